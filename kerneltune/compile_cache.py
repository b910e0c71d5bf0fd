"""Where the compiled kernels of searches lie, and how that folder is kept below a cap.

Compile children and the GPU process share a Triton cache of kerneltune's own, so that thousands of tried configs do not
fill the cache of the user's programs. A user who has set TRITON_CACHE_DIR has chosen: that folder is used, and left
alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

CAP_BYTES = 2 << 30  # about 10,000 compiled kernels
IN_USE_S = 60.0  # younger entries may have been compiled for a trial that is still to come
VARIABLE = "TRITON_CACHE_DIR"


def environment() -> dict[str, str | None]:
    """What a child process needs to share the folder; {} if the user has chosen one."""
    return {} if os.environ.get(VARIABLE) else {VARIABLE: str(folder())}


def folder() -> Path:
    """Kerneltune's own cache of compiled kernels."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("kerneltune")) / "triton"


def prune(path: Path | None = None, cap_bytes: int = CAP_BYTES, now: float | None = None) -> int:
    """Delete the entries that were not used for the longest until the rest is below the cap; bytes deleted.

    Entries used within the last minute stay. `path`: default, the own folder, unless the user has chosen another.
    What cannot be read or deleted (another process prunes too, say) is passed over.
    """
    if path is None:
        if os.environ.get(VARIABLE):
            return 0
        path = folder()
    now = time.time() if now is None else now
    entries = [entry for child in _children(path) if (entry := _entry(child)) is not None]
    total = sum(size for _, size, _ in entries)
    deleted = 0
    for used, size, child in sorted(entries):
        if total - deleted <= cap_bytes or used > now - IN_USE_S:
            break
        shutil.rmtree(child, ignore_errors=True)
        deleted += size
    return deleted


def _children(path: Path) -> list[Path]:
    try:
        return [child for child in path.iterdir() if child.is_dir()]
    except OSError:
        return []


def _entry(child: Path) -> tuple[float, int, Path] | None:
    """(when it was last used, bytes, the entry's folder)."""
    used, size = 0.0, 0
    with contextlib.suppress(OSError):
        for file in (child, *child.iterdir()):
            status = file.stat()
            size += status.st_size
            used = max(used, status.st_mtime, status.st_atime if file is not child else 0.0)
        return used, size, child
    return None
