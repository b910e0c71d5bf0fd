"""Lookup of tuned configs at launch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Which workload keys a table matches exactly, to the nearest entry, and as a hint of the input class."""

    exact: tuple[str, ...]
    scaled: tuple[str, ...]
    input: str
    usual_input: str  # the class preferred when the caller gives none

    @property
    def all(self) -> tuple[str, ...]:
        """Every workload key."""
        return (*self.exact, *self.scaled, self.input)


KEYS = {
    "mla-decode": Keys(
        exact=(
            *("dtype", "kv_dtype", "heads", "h_kv", "s_q", "causal", "page_size"),
            *("kv_lora_rank", "qk_rope_head_dim"),
        ),
        scaled=("batch", "kv_len"),
        input="lengths",
        usual_input="equal",
    ),
    "moe": Keys(
        exact=("dtype", "w_dtype", "group", "E", "global_E", "N", "K", "top_k", "activation", "bias"),
        scaled=("tokens",),
        input="routing",
        usual_input="uniform",
    ),
}
