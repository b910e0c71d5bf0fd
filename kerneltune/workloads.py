"""From a model, its parallelism and `key=value` lists to workloads: the problems that a search tunes.

A preset gives the sizes that a model fixes; ladders give the sizes that traffic varies; the kernel's own defaults give
the rest. Limits: expert and tensor parallelism divide evenly, and tensor parallelism divides the width of each expert.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kerneltune.errors import UserError
from kerneltune.expressions import suggest
from kerneltune.kernels.table_format import KEYS, table_workload
from kerneltune.registry import load_tunable
from kerneltune.space import SHIPPED, Space, parse_toml, read_toml_text

MODELS_FILE = "models.toml"
DEFAULT_MODEL = "deepseek-v3"
DEFAULT_TP = 8

_BETWEEN = re.compile(r"\s*,\s*|\s+(?=\w+\s*=)")  # a file's name may hold blanks
_INTEGER = re.compile(r"-?\d{1,18}\Z")


class MlaSizes(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What multi-head latent attention of a model fixes, before parallelism."""

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int


class MoeSizes(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the routed experts of a model fix, before parallelism."""

    E: int
    N: int
    K: int
    top_k: int


class Model(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One preset of models.toml."""

    aliases: tuple[str, ...] = ()
    served_in: str = "bf16"  # the dtype of the experts' weights in service
    mla: MlaSizes | None = None
    moe: MoeSizes | None = None


def base_sizes(kernel: str, model: str | None, tp: int | None, ep: int) -> dict[str, Any]:
    """The workload keys of a model preset: DeepSeek-V3 on each of 8 GPUs unless something else is named."""
    split = tp if tp is not None else (1 if model else DEFAULT_TP)
    return model_workload(kernel, model or DEFAULT_MODEL, split, ep)


def served_note(kernel: str, model: str | None) -> str | None:
    """What to tell who tunes experts that are served in a format that the kernels do not have yet, or None."""
    name, preset = _find_model(model or DEFAULT_MODEL)
    served = preset.served_in
    if kernel != "moe" or served == "bf16":
        return None
    return f"warning: {name} is served in {served}; it runs in bf16: {served} is not supported yet"


def model_workload(kernel: str, model: str, tp: int = 1, ep: int = 1) -> dict[str, Any]:
    """The workload keys that one GPU's share of a model fixes.

    Tensor parallelism `tp` divides the heads (mla-decode) or each expert's width N (moe); expert parallelism `ep`
    divides the experts, and leaves attention as it is.

    Raises:
        UserError: unknown model, a model without that operation, or a split that does not divide.
    """
    name, preset = _find_model(model)
    for option, parts in (("tp", tp), ("ep", ep)):
        if parts < 1:
            raise UserError(f"--{option}: expected a whole number from 1, got {parts}")
    if kernel == "mla-decode":
        if preset.mla is None:
            raise UserError(f"{name} has no multi-head latent attention; models with it: {', '.join(_names('mla'))}")
        sizes = msgspec.structs.asdict(preset.mla)
        sizes["heads"] = _divide(preset.mla.heads, tp, f"--tp {tp}", f"the {preset.mla.heads} heads of {name}")
        return sizes
    if preset.moe is None:
        raise UserError(f"{name} has no mixture of experts; models with it: {', '.join(_names('moe'))}")
    moe = preset.moe
    return {
        "E": _divide(moe.E, ep, f"--ep {ep}", f"the {moe.E} experts of {name}"),
        "global_E": moe.E,
        "N": _divide(moe.N, tp, f"--tp {tp}", f"N = {moe.N} of {name}"),
        "K": moe.K,
        "top_k": moe.top_k,
    }


def parse_workload(text: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of "batch=8,kv_len=4096", or "batch=8 kv_len=4096". Whole numbers and true / false are read
    as such.

    Raises:
        UserError: not a list of key=value, or a key named twice.
    """
    given: dict[str, Any] = {}
    for item in _BETWEEN.split(text.strip()):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not (key and equals and value):
            raise UserError(f"--workload {text!r}: expected key=value,key=value..., got {item.strip()!r}")
        if key in given:
            raise UserError(f"--workload {text!r}: {key} is named twice")
        given[key] = _parse_value(value)
    return {**base, **given}


def ladder_workloads(kernel: str, base: Mapping[str, Any], ladder: str, space: Space) -> list[dict[str, Any]]:
    """The complete workloads of a ladder of the space, with `base` for every key that a ladder does not step through.

    Raises:
        UserError: no ladder has that name.
        ValueError: the kernel rejects a workload.
    """
    tunable = load_tunable(kernel)
    return [dict(tunable.complete_workload({**base, **step})) for step in space.ladder(ladder)]


def format_workload(kernel: str, workload: Mapping[str, Any]) -> str:
    """One short text: sizes that tell workloads apart, then whatever is not as usual, then the dtype."""
    usual = dict(_USUAL.get(kernel, {}))
    for key, same_as in _SAME.items():
        if same_as in workload:
            usual[key] = workload[same_as]
    first = [key for key in _FIRST.get(kernel, ()) if key in workload]
    rest = [key for key, value in workload.items() if key not in (*first, "dtype") and usual.get(key, _NEVER) != value]
    workload = table_workload(kernel, workload) if kernel in KEYS else workload
    words = [f"{key}={_format_value(workload[key])}" for key in (*first, *rest)]
    return " ".join([*words, str(workload["dtype"])] if "dtype" in workload else words)


_NEVER = object()
_FIRST = {"mla-decode": ("batch", "kv_len", "heads"), "moe": ("tokens", "E", "N", "K", "top_k")}
_SAME = {"kv_dtype": "dtype", "w_dtype": "dtype", "global_E": "E"}  # not shown where equal
_USUAL = {
    "mla-decode": {
        "h_kv": 1,
        "s_q": 1,
        "causal": False,
        "page_size": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "lengths": "equal",
    },
    "moe": {"group": "none", "activation": "silu", "bias": False, "routing": "uniform"},
}


@functools.cache
def models() -> dict[str, Model]:
    """The presets by name, in file order.

    Raises:
        UserError: a fault in models.toml.
    """
    data = parse_toml(read_toml_text(SHIPPED / MODELS_FILE, MODELS_FILE), MODELS_FILE)
    found = {}
    for name, table in data.items():
        try:
            found[name] = msgspec.convert(table, Model)
        except msgspec.ValidationError as error:
            raise UserError(f"{MODELS_FILE}: {name}: {error}") from None
    return found


def _find_model(model: str) -> tuple[str, Model]:
    for name, preset in models().items():
        if model.lower() in (name, *preset.aliases):
            return name, preset
    known = [alias for name, preset in models().items() for alias in (name, *preset.aliases)]
    hint = suggest(model.lower(), known)
    raise UserError(f"unknown model {model!r}{hint}" + (f" (of {', '.join(known)})" if "mean" in hint else ""))


def _names(field: str) -> list[str]:
    return [name for name, preset in models().items() if getattr(preset, field) is not None]


def _divide(total: int, parts: int, option: str, what: str) -> int:
    if total % parts:
        raise UserError(f"{option} does not divide {what}")
    return total // parts


def _parse_value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if _INTEGER.match(text) else text


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
