"""The one way this project times work on a GPU. Every number in a record, a table or a document comes from here.

Cold: before each sample the last-level cache is evicted by *reading* a buffer. Writing one (a memset) would leave dirty
lines whose write-back is charged to the kernel: 7 % on memory-bound kernels of an H200.
Captured: a launch is timed as the replay of a CUDA graph, so that Python and the driver stay out of the number.
Asynchronous: samples of a batch are enqueued without waiting in between. The flush takes longer than the host needs to
enqueue a sample, so the GPU never waits for the host between the two events.
Offset: a graph of one tiny node costs about 4 us cold (`empty_graph_us`); times are as read, the offset is told beside.
Order: right after a matrix-bound kernel the next one is slower (up to 23 % on an H200), so finalists are timed in
turns, in random orders and their reverses, each turn after a pause. Clocks are read and never set.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

FLUSH_BYTES = 512 << 20  # 8 x the L2 of an H200; reading it takes 0.12 ms there, 4 x what the host needs for a sample
FLUSH_L2_MULTIPLE = 4
SEARCH_SAMPLES = 15
BATCH = 5  # samples between two looks at the clock and at `stop_above_us`
DROP_AFTER = 4  # samples before a slow config may be dropped
WARM_REPLAYS = 2  # the first replay uploads the graph
WARM_S = 0.01  # of flushing before the first sample: an idle GPU needs some milliseconds to raise its clocks
PAUSE_S = 0.25

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Samples of one launch in microseconds, as read, in the order taken."""

    samples_us: tuple[float, ...]
    dropped: bool = False  # ended early because it was slower than asked for

    @property
    def time_us(self) -> float:
        """The median."""
        return statistics.median(self.samples_us)

    @property
    def p20_us(self) -> float:
        """One sample in five is faster."""
        return quantile(self.samples_us, 0.2)

    @property
    def p80_us(self) -> float:
        """One sample in five is slower."""
        return quantile(self.samples_us, 0.8)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics (NumPy's default)."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Flush:
    """Evicts the last-level cache by reading a buffer that is several times its size."""

    def __init__(self, l2_bytes: int, device: torch.device | str = "cuda") -> None:
        """Allocate the buffer: 512 MiB or four caches."""
        size = max(FLUSH_BYTES, FLUSH_L2_MULTIPLE * l2_bytes)
        self._buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
        self._sink = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Enqueue one read of the whole buffer on the current stream; writes 4 bytes."""
        torch.amax(self._buffer, 0, out=self._sink)

    def warm(self, seconds: float) -> None:
        """Flush for that long, so that the GPU leaves its idle clocks; returns when it is done."""
        end = time.perf_counter() + seconds
        while True:
            for _ in range(8):
                self()
            torch.cuda.synchronize()
            if time.perf_counter() >= end:
                return


def capture(run: Run) -> torch.cuda.CUDAGraph:
    """`run`'s launches as a graph. Runs it once before, on the same side stream, so that modules get loaded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side), _no_garbage_collection():
        graph.capture_begin()
        try:
            run()
        except BaseException:
            with contextlib.suppress(Exception):  # the capture is invalid; the first error is the one to tell
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Unloading an old module or graph in the middle of a capture would spoil it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_launch(
    run: Run,
    *,
    flush: Flush,
    samples: int = SEARCH_SAMPLES,
    budget_s: float = 5.0,
    stop_above_us: float | None = None,
) -> Timing:
    """Time `run` (which enqueues launches and allocates nothing) as a graph, cold.

    Args:
        samples: how many at most; at least one is taken.
        budget_s: no further batch begins after this much time.
        stop_above_us: drop it once four samples are in and four in five are slower than this.
    """
    graph = capture(run)
    return time_calls(graph.replay, flush=flush, samples=samples, budget_s=budget_s, stop_above_us=stop_above_us)


def time_calls(
    call: Run,
    *,
    flush: Flush,
    samples: int,
    budget_s: float = 5.0,
    stop_above_us: float | None = None,
    warm_s: float = WARM_S,
) -> Timing:
    """Time single calls, cold, uncaptured: for graph replays, and for ceilings (a copy in a graph is slow)."""
    begin = time.perf_counter()
    flush.warm(warm_s)
    once_s = _warm_once_s(call, flush)
    taken: list[float] = []
    while True:
        left_s = budget_s - (time.perf_counter() - begin)
        taken += _batch_us(call, flush, max(1, min(BATCH, samples - len(taken), int(left_s / once_s))))
        if stop_above_us is not None and len(taken) >= DROP_AFTER and quantile(taken, 0.2) > stop_above_us:
            return Timing(tuple(taken), dropped=True)
        if len(taken) >= samples or time.perf_counter() - begin >= budget_s:
            return Timing(tuple(taken))


def time_interleaved(
    runs: Sequence[Run],
    *,
    flush: Flush,
    rounds: int,
    samples_per_turn: int,
    pause_s: float = PAUSE_S,
    seed: int = 0,
) -> list[Timing]:
    """Time several launches in turns, in the orders of `turns`, each turn after a pause.

    Returns:
        For each run all its samples, `rounds * samples_per_turn`, round after round.
    """
    replays = [capture(run).replay for run in runs]
    taken: list[list[float]] = [[] for _ in runs]
    for order in turns(len(runs), rounds, seed):
        for number in order:
            time.sleep(pause_s)
            flush.warm(WARM_S)
            _warm_once_s(replays[number], flush)
            taken[number] += _batch_us(replays[number], flush, samples_per_turn)
    return [Timing(tuple(samples)) for samples in taken]


def turns(count: int, rounds: int, seed: int) -> list[list[int]]:
    """The order of each round: a random one, then its reverse, so that in every two rounds each launch follows as many
    others as it precedes; then the next random one."""
    draw = random.Random(seed)
    orders: list[list[int]] = []
    for number in range(rounds):
        orders.append(orders[-1][::-1] if number % 2 else draw.sample(range(count), count))
    return orders


def empty_graph_us(flush: Flush, samples: int = 40) -> float:
    """What reading a time costs: the median cold replay of a graph that sets four bytes."""
    word = torch.ones(1, dtype=torch.int32, device="cuda")
    return time_launch(word.zero_, flush=flush, samples=samples).time_us


def warm_clocks(seconds: float = 0.3) -> None:
    """Multiply matrices for that long: once, when a process begins to measure."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            torch.matmul(a, a)
        torch.cuda.synchronize()


def _warm_once_s(call: Run, flush: Flush) -> float:
    """Call a few times cold and wait; seconds of one sample, flush and host included."""
    begin = time.perf_counter()
    for _ in range(WARM_REPLAYS):
        flush()
        call()
    torch.cuda.synchronize()
    return max((time.perf_counter() - begin) / WARM_REPLAYS, 1e-6)


def _batch_us(call: Run, flush: Flush, count: int) -> list[float]:
    """`count` samples in microseconds, enqueued back to back, then read."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    flush()  # gives the host a head start
    for start, end in pairs:
        flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in pairs]
