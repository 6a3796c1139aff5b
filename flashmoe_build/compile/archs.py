"""The targets that a build compiles for: FLASHMOE_ARCHS (or FA_ARCHS) = all | native | none | a list such as 90a,80."""

import ctypes
from collections.abc import Iterable, Mapping

from flashmoe.errors import BuildError
from flashmoe_tools.tables import Tables, Target

VARIABLES = ("FLASHMOE_ARCHS", "FA_ARCHS")
_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, cuda.h
_CAPABILITY_MINOR = 76


def requested(environment: Mapping[str, str], argument: str | None) -> str:
    """The request from the command line, else from the environment, else ``all``."""
    if argument:
        return argument
    for variable in VARIABLES:
        if environment.get(variable):
            return environment[variable]
    return "all"


def resolve(request: str, tables: Tables) -> tuple[Target, ...]:
    """Targets named by ``request``, in table order. Raises BuildError for a name that is not in the table."""
    words = [word for word in request.replace(";", ",").replace(" ", ",").split(",") if word]
    if words == ["all"]:
        return tables.targets
    if words == ["none"]:
        return ()
    if words == ["native"]:
        chosen = {name for capability in native_capabilities() for name in _serving(capability, tables)}
    else:
        chosen = {_named(word, tables).name for word in words}
        chosen |= {name for word in words for name in _serving_gpu(word, tables)}
    if not chosen:
        msg = f"FLASHMOE_ARCHS={request!r} names no target; use all, native, none, or a list of {_names(tables)}"
        raise BuildError(msg)
    return tuple(target for target in tables.targets if target.name in chosen)


def _names(tables: Tables) -> str:
    return ", ".join(target.name for target in tables.targets)


def _named(word: str, tables: Tables) -> Target:
    plain = word.removeprefix("sm_").removeprefix("sm").replace(".", "")
    for target in tables.targets:
        if word == target.name or (not target.is_ptx and plain == target.name.removeprefix("sm_")):
            return target
    if plain in {
        "".join(map(str, gpu.compute_capability)) for gpu in tables.gpus
    }:  # 90: its machine code is arch-specific in the table; 89 runs the machine code for 8.6
        return _best_for(plain, tables)
    if word.lower() in ("all", "native", "none"):
        msg = f"FLASHMOE_ARCHS: unknown target {word!r}; write {word.lower()} in lower case and as the only value, or leave it out of the list"
        raise BuildError(msg)
    msg = f"FLASHMOE_ARCHS (or FA_ARCHS): unknown target {word!r}; known: {_names(tables)}, or all, native, none"
    raise BuildError(msg)


def _serving_gpu(word: str, tables: Tables) -> set[str]:
    """Names of the targets needed by a GPU of the compute capability in ``word``; empty if ``word`` names a target."""
    plain = word.removeprefix("sm_").removeprefix("sm").replace(".", "")
    known = (gpu.compute_capability for gpu in tables.gpus)
    return next((_serving(capability, tables) for capability in known if plain == "{}{}".format(*capability)), set())


def _serving(capability: tuple[int, int], tables: Tables) -> set[str]:
    """The best target for a GPU, and the best fallback for each kernel that is not compiled for that target."""
    best = _best_for("{}{}".format(*capability), tables)
    targets: dict[tuple[str, str, tuple[int, ...]], set[Target]] = {}
    for unit in tables.units():
        kernel = (unit.row.operation, unit.dtype, tuple(unit.row.axes.values()))
        targets.setdefault(kernel, set()).add(unit.target)
    lacking = [others for others in targets.values() if best not in others]
    served = (_loadable(others, capability) for others in lacking)
    return {best.name, *(target.name for target in served if target is not None)}


def _best_for(word: str, tables: Tables) -> Target:
    capability = (int(word[:-1]), int(word[-1]))
    best = _loadable(tables.targets, capability)
    if best is None:
        msg = f"no target runs on compute capability {capability[0]}.{capability[1]}; known: {_names(tables)}"
        raise BuildError(msg)
    return best


def _loadable(targets: Iterable[Target], capability: tuple[int, int]) -> Target | None:
    """The best target that a GPU can load: machine code for it, else for an older GPU of its major version, else PTX."""
    known = tuple(targets)
    exact = [t for t in known if not t.is_ptx and t.capability == capability]
    same_major = [
        t
        for t in known
        if not t.is_ptx and not t.is_arch_specific and t.capability[0] == capability[0] and t.capability <= capability
    ]
    ptx = [t for t in known if t.is_ptx and t.capability <= capability]
    for candidates in (exact, same_major, ptx):
        if candidates:
            return max(candidates, key=lambda target: target.capability)
    return None


def native_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of this machine's GPUs, from the driver; raises BuildError if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        msg = "FLASHMOE_ARCHS=native needs the NVIDIA driver (libcuda.so.1), which is not here; name targets: 90a,80"
        raise BuildError(msg) from error
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        msg = "FLASHMOE_ARCHS=native found no usable GPU; name targets instead, for example FLASHMOE_ARCHS=90a"
        raise BuildError(msg)
    found = set()
    for index in range(count.value):
        value = ctypes.c_int(0)
        pair = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index) != 0:
                msg = f"the driver does not report the compute capability of GPU {index}"
                raise BuildError(msg)
            pair.append(value.value)
        found.add((pair[0], pair[1]))
    return sorted(found)
