"""Builds the compiled codec with the package, where there is a C compiler.

Without one, or with PENSTOCK_PURE_PYTHON=1, the package is built without, and says so: the codec in
pure Python serves then, with the same results (penstock.wire.codec).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from sysconfig import get_config_var
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("proto/penstock/wire/_codec.pyx")
MODULE = "penstock.wire._codec"
FLAGS = ["-O3", "-g0"]
PURE = "PENSTOCK_PURE_PYTHON"


class CodecBuildHook(BuildHookInterface[Any]):
    """Puts the compiled module beside its source for an editable install, else into the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is written."""
        root = Path(self.root)
        beside = root / SOURCE.with_name(SOURCE.stem + str(get_config_var("EXT_SUFFIX")))
        if version == "editable":
            beside.unlink(missing_ok=True)  # It may be of another source.
        if os.environ.get(PURE) == "1":
            return
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-codec-"))
        try:
            built = compile_codec(root / SOURCE, self._directory)
        except Exception as error:  # Whatever it is, the package works without.
            self.app.display_warning(
                f"The compiled codec was not built, and the one in pure Python serves: {error}. "
                f"It needs a C compiler and Python's headers; set {PURE}=1 to build without it."
            )
            return
        if version == "editable":
            shutil.copy2(built, beside)
        else:
            build_data["force_include"][str(built)] = f"penstock/wire/{built.name}"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After the wheel was written."""
        with contextlib.suppress(AttributeError):
            shutil.rmtree(self._directory, ignore_errors=True)


def compile_codec(
    source: Path, directory: Path, flags: Sequence[str] = FLAGS, link_flags: Sequence[str] = ()
) -> Path:
    """Compile the module into ``directory``; where it is. Raises whatever the compiler does."""
    # Where these are missing, or too old, the package is built without.
    from Cython.Build import cythonize  # noqa: PLC0415 - see above.
    from setuptools import Distribution, Extension  # noqa: PLC0415 - see above.
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415 - see above.

    extension = Extension(
        MODULE, [str(source)], extra_compile_args=[*flags], extra_link_args=[*link_flags]
    )
    modules = cythonize(
        [extension], build_dir=str(directory / "c"), language_level=3, quiet=True, force=True
    )
    command = build_ext(Distribution({"name": "penstock", "ext_modules": modules}))
    command.build_lib = str(directory)
    command.build_temp = str(directory / "o")
    command.ensure_finalized()
    command.run()
    (built,) = directory.glob("penstock/wire/_codec.*.so")
    return built
