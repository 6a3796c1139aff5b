"""Hatchling's hooks: the library in a wheel, the commit in an sdist, the version and long description of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def project_version() -> str:
    """The version; hatchling calls this because pyproject.toml names it."""
    from flashmoe_build.release import version

    return version.project_version(ROOT)


class FlashmoeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled library, its provenance and the tables to a wheel, and the commit to an sdist."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            self._record_commit(build_data)
        elif version != "editable":  # an editable install links the checkout, which loads build/lib/libflashmoe.so
            self._compile(build_data)

    def _record_commit(self, build_data: dict[str, Any]) -> None:
        from flashmoe_build.release.version import COMMIT_FILE, commit_json, find_commit

        record = ROOT / "build" / COMMIT_FILE
        record.parent.mkdir(exist_ok=True)
        record.write_text(commit_json(find_commit(ROOT)), encoding="utf-8")
        build_data["force_include"][str(record)] = COMMIT_FILE

    def _compile(self, build_data: dict[str, Any]) -> None:
        from flashmoe_build.compile.build import build
        from flashmoe_build.release.wheel import build_folder, wheel_tag
        from flashmoe_tools.tables import table_files
        from flashmoe_tools.versions import with_version

        built = build(build_folder(ROOT))
        source = ROOT / "flashmoe" / "_version.py"
        stated = build_folder(ROOT) / "generated" / "_version.py"
        stated.write_text(with_version(source.read_text(encoding="utf-8"), self.metadata.version), encoding="utf-8")
        build_data["pure_python"] = False
        build_data["tag"] = wheel_tag()
        build_data["sbom_files"].append(str(built.bill))
        build_data["force_include"].update(
            {
                str(built.library): "flashmoe/libflashmoe.so",
                str(built.provenance): "flashmoe/provenance.json",
                str(stated): "flashmoe/_version.py",
                **{
                    str(path): f"flashmoe/_tables/{path.relative_to(ROOT / 'csrc').as_posix()}"
                    for path in table_files(ROOT / "csrc")
                },
            }
        )


class FlashmoeMetadataHook(MetadataHookInterface):
    """README.md as the long description, with links into the repository at this version's tag."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        from flashmoe._version import __version__
        from flashmoe_tools.links import long_description

        text = (ROOT / "README.md").read_text(encoding="utf-8")
        body = long_description(text, __version__, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": body}
