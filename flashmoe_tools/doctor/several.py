"""The verdict on several GPUs. Pure, like all of ``judge``."""

from flashmoe_tools.doctor.facts import Facts
from flashmoe_tools.report import Check, Verdict


def several(facts: Facts) -> Check:
    """Requirements of flashmoe.distributed: NCCL, and how the GPUs reach each other's memory."""
    name, count, have = "several GPUs", len(facts.driver.gpus), facts.links
    if not facts.probe.torch_version:
        return Check(name, Verdict.SKIP, "not queried: torch was not imported")
    nccl = f"NCCL {facts.probe.nccl}" if facts.probe.nccl else "torch without NCCL"
    if count == 0:
        why = "without a GPU neither peer access nor topology can be queried; flashmoe.distributed runs on gloo"
        return Check(name, Verdict.SKIP, nccl, "", why)
    if count == 1:
        return Check(name, Verdict.PASS, f"{nccl}; one GPU, so there is no peer")
    expected = "NCCL, and peer access between all GPUs"
    found = f"{nccl}; {count} GPUs, {_reach(facts)}; {_topology(facts)}"
    if not facts.probe.nccl:
        why = "GPUs communicate only through NCCL; gloo goes through the host's memory"
        return Check(name, Verdict.WARN, found, expected, why, "install torch's CUDA build")
    if have.peers_problem:
        return Check(name, Verdict.WARN, found, expected, "the driver did not report it", "nvidia-smi topo -p2p r")
    if have.unreachable:
        why = "messages between them go through the host's memory, several times slower"
        fix = "nvidia-smi topo -p2p r; a hypervisor, an IOMMU or PCIe's ACS may forbid it"
        return Check(name, Verdict.WARN, found, expected, why, fix)
    return Check(name, Verdict.PASS, found, expected)


def _reach(facts: Facts) -> str:
    if facts.links.peers_problem:
        return f"peer access unknown ({facts.links.peers_problem})"
    pairs = [f"{a} to {b}" for a, b in facts.links.unreachable]
    return f"no peer access from {', '.join(pairs)}" if pairs else "peer access between all"


def _topology(facts: Facts) -> str:
    if not facts.links.topology:
        return f"topology unknown ({facts.links.topology_problem or 'not queried'})"
    rows = enumerate(facts.links.topology)
    pairs = {(a, b): word for a, row in rows for b, word in enumerate(row) if a < b}
    words = dict.fromkeys(pairs.values())
    if len(words) == 1:
        return f"all by {next(iter(words))}"
    return ", ".join(f"{a}-{b} {word}" for (a, b), word in pairs.items())
