"""Whether a table's entry still speaks of the code that would run: of this compiler, and of this kernel's source.

KERNELTUNE_STALE says what a launch does with an entry that does not: `strict` leaves it out (the default config is
used), `warn` uses it and says so once, `ignore` uses it. One word holds for both kinds; "compiler=ignore,source=warn"
names them. Without it: another compiler is `warn`, since most winners stay good; a changed source is `strict`, since
the entry was measured on other code.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerneltune.kernels.source_hash import variant_hash, variant_of

VARIABLE = "KERNELTUNE_STALE"
POLICIES = ("strict", "warn", "ignore")
DEFAULTS = {"compiler": "warn", "source": "strict"}


@dataclass(frozen=True)
class Stale:
    """One way in which an entry is out of date."""

    kind: str  # "compiler", "source"
    reason: str  # "measured with triton 3.6.0, here is 3.9.0"


def staleness(kernel: str, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> tuple[Stale, ...]:
    """How an entry's provenance differs from what is here. What it does not state (an imported table) is not judged."""
    found = []
    triton, here = provenance.get("triton"), triton_version()
    if isinstance(triton, str) and triton != here:
        found.append(Stale("compiler", f"measured with triton {triton:.40}, here is {here}"))
    hashes = provenance.get("kernel_hash")
    variant = variant_of(kernel, config)
    measured = hashes.get(variant) if isinstance(hashes, Mapping) else hashes
    if isinstance(measured, str):
        own = variant_hash(kernel, variant)
        if own is None:
            found.append(Stale("source", f"variant {variant:.40} is not in this version of kerneltune"))
        elif measured != own:
            found.append(Stale("source", f"measured with source {measured:.40} of {variant}, here is {own}"))
    return tuple(found)


def parse_policies(text: str) -> dict[str, str]:
    """The policy of each kind, as KERNELTUNE_STALE writes it.

    Raises:
        ValueError: another word, naming it.
    """
    if text in POLICIES:
        return dict.fromkeys(DEFAULTS, text)
    found = dict(DEFAULTS)
    for item in filter(None, text.split(",")):
        kind, _, policy = item.partition("=")
        if kind not in DEFAULTS or policy not in POLICIES:
            raise ValueError(
                f"{VARIABLE}: expected {', '.join(POLICIES)}, or compiler=... and source=..., got {text!r:.60}"
            )
        found[kind] = policy
    return found


def policies() -> tuple[dict[str, str], str]:
    """The policies in force, and what is wrong with the environment's: "" if nothing is."""
    try:
        return parse_policies(os.environ.get(VARIABLE, "").strip()), ""
    except ValueError as error:
        return dict(DEFAULTS), str(error)


@functools.cache
def triton_version() -> str:
    """The version of Triton here, without importing it where the installation says it; "none" where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build of another name, a checkout, or none
        try:
            import triton
        except ImportError:
            return "none"
        return str(triton.__version__)
