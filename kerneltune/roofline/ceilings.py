"""Measured ceilings on the disk: kept a week for each device and driver, so that a search need not measure them again.

`measure/ceilings.py` measures them; this module only keeps them.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kerneltune.device import slug
from kerneltune.roofline.model import Ceilings

FRESH_FOR = datetime.timedelta(days=7)


def store(ceilings: Ceilings, path: Path | None = None) -> Path:
    """Write ceilings as JSON, whole or not at all; default: the user's cache folder. Returns the path."""
    path = path or cache_path(ceilings.device, ceilings.versions)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(json.dumps(ceilings.to_dict(), indent=2) + "\n")
    os.replace(file.name, path)
    return path


def load(path: Path) -> Ceilings:
    """Read ceilings that `store` wrote.

    Raises:
        ValueError: not such a file; one line naming it.
        OSError: it cannot be read.
    """
    try:
        found = Ceilings.from_dict(json.loads(path.read_text()))
        numbers = (found.dram_read_gbps, found.dram_copy_gbps, found.launch_us, *found.tflops.values())
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ValueError("a rate is not a positive number")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of measured ceilings ({error})") from None
    return found


def cached(device_name: str, versions: Mapping[str, str], now: datetime.datetime | None = None) -> Ceilings | None:
    """The kept ceilings of this device and driver, if younger than a week."""
    try:
        found = load(cache_path(device_name, versions))
        age = (now or datetime.datetime.now(datetime.UTC)) - datetime.datetime.fromisoformat(found.date)
    except (OSError, ValueError, TypeError):
        return None
    fresh = datetime.timedelta(0) <= age < FRESH_FOR
    return found if fresh and found.versions.get("driver") == versions.get("driver") else None


def cache_path(device_name: str, versions: Mapping[str, str]) -> Path:
    """Where the ceilings of a device under a driver are kept."""
    import platformdirs

    driver = slug(versions.get("driver", "unknown-driver"))
    return Path(platformdirs.user_cache_dir("kerneltune")) / "ceilings" / f"{slug(device_name)}--{driver}.json"
