"""One killable process that owns the GPU: it gates and times configs, one request at a time.

`GpuWorker` is the tuner's side: it never hangs and never raises for what a config does. A request that takes too long,
a process that dies, and a CUDA error after which the context is unusable all end that process; the request gets its
outcome, the next request a fresh process, and no other config is blamed. `Measurer` is the process's side and works
in-process too, on the CPU in Triton's interpreter: then there is no timing, only the gate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerneltune import compile_cache
from kerneltune.child import Child, ChildDied, ChildStartError, ChildTimeout
from kerneltune.errors import UserError

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Config, Launch, Verdict, Workload
    from kerneltune.measure.gate import Case
    from kerneltune.measure.timing import Timing

START_TIMEOUT_S = 180.0  # importing torch and triton, creating a CUDA context, warming the clocks
PREPARE_TIMEOUT_S = 300.0  # inputs and references of one workload; compiling for the edge problems is not in it
TRIAL_TIMEOUT_S = 60.0  # one config: compile where the cache has nothing, gate, time
CEILINGS_TIMEOUT_S = 120.0
CONDITIONS_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 120.0  # for a killed process to be gone
FINAL_SAMPLES = 20  # a turn
FINAL_ROUNDS = 4
FINAL_LAUNCHES = 10  # of each finalist, compared bit by bit
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM")  # nothing that a kernel does ends a process so: somebody else did

Edges = Sequence[tuple[str, "Workload"]]
Reply = dict[str, Any]


class GpuWorker:
    """Drives one measuring process and replaces it when it has to be killed. Not for several threads at once."""

    def __init__(
        self,
        kernel: str | None,
        device_index: int | None = 0,
        *,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
        prepare_timeout_s: float = PREPARE_TIMEOUT_S,
    ) -> None:
        """Begin to start the process.

        Args:
            kernel: a registered name, or "package.module:NAME"; None: for `ceilings` only.
            device_index: torch's GPU number; None: the CPU, in Triton's interpreter, which can gate but not time.
        """
        self._kernel = kernel
        self._device_index = device_index
        self._trial_timeout_s = trial_timeout_s
        self._prepare_timeout_s = prepare_timeout_s
        self._prepared: str | None = None
        self.restarts = 0
        self._child = self._spawn()

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._child.pid

    def start(self) -> Reply:
        """Wait for the process: {"device": Device.to_dict(), "versions", "state" (clocks, power), "launch_us"}.

        Raises:
            UserError: it cannot start (the kernel cannot be imported, no such GPU).
        """
        reply = self._ask("start", {}, START_TIMEOUT_S)
        if reply["outcome"] != "ok":
            raise UserError(f"the GPU process cannot start: {reply['reason']}", exit_code=3)
        return reply

    def prepare(self, workload: Workload, seed: int = 0) -> Reply:
        """Make inputs, references and edge problems of a workload; frees the former ones. `trial` does it by itself.

        Returns:
            {"outcome": "ok" or "crashed" or "timed_out", "reason", "prepare_s"}.
        """
        if not self._child.alive:  # it died between two requests, or Ctrl-C cut one short: nobody's fault
            self._replace()
        key = json.dumps([dict(workload), seed], sort_keys=True)
        if key == self._prepared:
            return {"outcome": "ok", "reason": "", "prepare_s": 0.0}
        self._prepared = None
        reply = self._ask("prepare", {"workload": dict(workload), "seed": seed}, self._prepare_timeout_s)
        if reply["outcome"] == "ok":
            self._prepared = key
        else:
            reply["reason"] = f"preparing the workload: {reply['reason']}"
        return reply

    def trial(
        self,
        workload: Workload,
        part: str,
        config: Config,
        *,
        stop_above_us: float | None = None,
        samples: int = 15,
        budget_s: float = 5.0,
        seed: int = 0,
        gate: bool = True,
        raw: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """Gate a whole config on the whole operation, then time it, or only the launches of `part`.

        Args:
            part: which part to time; "" or the only part of a kernel: everything.
            stop_above_us: stop timing once the config is clearly slower; the outcome is still "ok", with fewer samples.
            samples: at most so many; 0: gate only.
            raw: add every sample, as "samples_us".
            timeout_s: of gate and timing together (default: the worker's `trial_timeout_s`).

        Returns:
            Fields of `records.Trial`: "outcome", "reason", "time_us", "p20_us", "p80_us", "samples" (how many),
            "launch_us", "error", "gate_s", "timing_s"; times are None unless "ok" and timed.
        """
        request = {
            "part": part,
            "config": _plain(config),
            "stop_above_us": stop_above_us,
            "samples": samples,
            "budget_s": budget_s,
            "gate": gate,
            "raw": raw,
        }
        return _empty_trial() | self._on_workload("trial", request, workload, seed, timeout_s or self._trial_timeout_s)

    def finals(
        self,
        workload: Workload,
        configs: Sequence[Config],
        *,
        part: str = "",
        rounds: int = FINAL_ROUNDS,
        samples: int = FINAL_SAMPLES,
        seed: int = 0,
        edges: Callable[[Config], Edges] | None = None,
    ) -> list[Reply]:
        """Gate each whole config, also on edge sizes, require the same bits again, then time in turns those that pass.

        Args:
            part: time only these launches, as in `trial`.
            samples: of one turn; a config gets `rounds * samples`.
            seed: of the inputs, and of the order of the turns.
            edges: the labelled workloads of `Tunable.edge_workloads` on which a config has to be right too. What a
                process has vetted it does not vet again.

        Returns:
            As `trial`, in the order of `configs`.
        """
        replies = []
        for config in configs:
            on = [(label, dict(edge)) for label, edge in edges(config)] if edges else []
            request = {"config": _plain(config), "edges": on, "seed": seed}
            replies.append(_empty_trial() | self._on_workload("vet", request, workload, seed, self._trial_timeout_s))
        self._time_in_turns(workload, part, configs, replies, rounds, samples, seed)
        return replies

    def _time_in_turns(
        self,
        workload: Workload,
        part: str,
        configs: Sequence[Config],
        replies: list[Reply],
        rounds: int,
        samples: int,
        seed: int,
    ) -> None:
        """Add the times of those that have passed to their replies.

        When the process fails under them all, each is run alone once, so that the one to blame is told from the rest.
        """
        alone = {"stop_above_us": None, "samples": 1, "budget_s": 1.0, "gate": False, "raw": False}
        for attempt in range(2):
            passed = [number for number, reply in enumerate(replies) if reply["outcome"] == "ok"]
            if not passed:
                return
            chosen = [_plain(configs[n]) for n in passed]
            request = {"part": part, "configs": chosen, "rounds": rounds, "samples": samples, "seed": seed}
            timed = self._on_workload(
                "interleave", request, workload, seed, self._trial_timeout_s + len(passed) * rounds * 2.0
            )
            if timed["outcome"] == "ok":
                for number, timing in zip(passed, timed["timings"], strict=True):
                    replies[number] |= timing
                return
            for number, config in zip(passed, chosen, strict=True):
                if attempt == 1:
                    replies[number] |= timed
                    continue
                reply = self._on_workload(
                    "trial", alone | {"part": part, "config": config}, workload, seed, self._trial_timeout_s
                )
                if reply["outcome"] != "ok":
                    replies[number] |= {"outcome": reply["outcome"], "reason": reply["reason"]}

    def ceilings(self) -> dict[str, Any]:
        """Measure the ceilings of the GPU: `Ceilings.to_dict()`.

        Raises:
            UserError: it could not be done.
        """
        reply = self._ask("ceilings", {}, CEILINGS_TIMEOUT_S)
        if reply["outcome"] != "ok":
            raise UserError(f"the ceilings cannot be measured: {reply['reason']}", exit_code=3)
        return dict(reply["ceilings"])

    def conditions(self) -> dict[str, Any]:
        """What `measure.conditions.read` sees now, under load: clocks, throttling, other processes, the probes."""
        if not self._child.alive:
            self._replace()
        return dict(self._ask("conditions", {}, CONDITIONS_TIMEOUT_S).get("conditions", {}))

    def close(self) -> None:
        """Kill the process."""
        self._child.close()

    def __enter__(self) -> GpuWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _on_workload(self, method: str, request: Reply, workload: Workload, seed: int, timeout_s: float) -> Reply:
        """Prepare and ask; once more if the process was killed from outside, which is not the config's doing."""
        for _ in range(2):
            reply = self.prepare(workload, seed)
            if reply["outcome"] == "ok":
                reply = self._ask(method, request, timeout_s)
            if not (reply["outcome"] == "crashed" and any(name in reply["reason"] for name in OUTSIDE_SIGNALS)):
                break
        return {name: value for name, value in reply.items() if name != "prepare_s"}

    def _ask(self, method: str, request: Reply, timeout_s: float) -> Reply:
        """One request; whatever happens to the process becomes an outcome, and it is replaced if need be."""
        try:
            self._child.wait_started(START_TIMEOUT_S)
            reply: Reply = self._child.request((method, request), timeout_s)
            fatal = reply.pop("fatal", False)
        except ChildTimeout:
            reply, fatal = (
                {"outcome": "timed_out", "reason": f"no result in {timeout_s:g} s; the process was killed"},
                True,
            )
        except ChildDied as error:
            reply, fatal = {"outcome": "crashed", "reason": f"the GPU process died: {error}"}, True
        except ChildStartError as error:
            reply, fatal = {"outcome": "crashed", "reason": f"the GPU process cannot start: {error}"}, True
        if fatal:
            self._replace()
        return reply

    def _replace(self) -> None:
        self._child.close()
        end = time.monotonic() + GONE_TIMEOUT_S
        while self._child.alive:  # the driver may still be busy stopping its kernel; nothing is timed beside that
            if time.monotonic() > end:
                raise UserError(f"the GPU process {self._child.pid} was killed but does not end; measuring stops", 1)
            time.sleep(0.1)
        self._prepared = None
        self.restarts += 1
        self._child = self._spawn()

    def _spawn(self) -> Child:
        env = {"TRITON_INTERPRET": "1" if self._device_index is None else None, **compile_cache.environment()}
        return Child("kerneltune.measure.worker:Measurer", self._kernel, self._device_index, env=env)


class Measurer:
    """Answers (method, arguments) with a dict that has at least "outcome" and "reason"; never raises.

    "fatal" is added when this process must be replaced: its CUDA context is unusable, or memory that others rely on
    (inputs, references) was overwritten.
    """

    def __init__(self, kernel: str | None, device_index: int | None = 0) -> None:
        """Load the kernel; with a GPU, make its context and warm its clocks."""
        import torch

        from kerneltune.compile import resolve_tunable

        self._index = device_index
        self._device = "cpu" if device_index is None else f"cuda:{device_index}"
        self._launch_us = 0.0
        self._cases: list[Case] = []
        self._edge_cases: dict[str, list[Case]] = {}  # small; by workload and seed
        self._vetted: set[str] = set()  # configs found right on an edge workload
        if kernel is not None:
            self._tunable = resolve_tunable(kernel)
        if device_index is not None:
            import triton

            from kerneltune.kernels.device import current_device
            from kerneltune.measure import timing

            torch.cuda.set_device(device_index)
            triton.set_allocator(_scratch)
            self._flush = timing.Flush(current_device(device_index).l2_bytes)
            timing.warm_clocks()
            self._launch_us = timing.empty_graph_us(self._flush)

    def __call__(self, message: tuple[str, Mapping[str, Any]]) -> Reply:
        """Answer one request."""
        from kerneltune.measure.gate import MemoryChanged

        method, arguments = message
        try:
            reply = {"outcome": "ok", "reason": ""} | getattr(self, f"_{method}")(**arguments)
            self._synchronize()
        except MemoryChanged as error:
            reply = {"outcome": "wrong", "reason": str(error), "fatal": True}
        except Exception as error:  # whatever a config can raise
            reply = self._failure(error)
        return reply

    def _failure(self, error: Exception) -> Reply:
        """An exception as an outcome."""
        import torch

        from kerneltune.compile import classify

        outcome, reason = classify(error, otherwise="crashed")
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of GPU memory"
        error.__traceback__ = None  # its frames hold tensors
        if self._index is None:
            return {"outcome": outcome, "reason": reason}
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            return {"outcome": "crashed", "reason": reason, "fatal": True}
        return {"outcome": outcome, "reason": reason}

    def _synchronize(self) -> None:
        if self._index is not None:
            import torch

            torch.cuda.synchronize()

    def _start(self) -> Reply:
        from kerneltune import device as devices
        from kerneltune.kernels.device import current_device

        described = None if self._index is None else current_device(self._index).to_dict()
        versions = devices.versions(self._index)
        return {"device": described, "versions": versions, "launch_us": self._launch_us}

    def _conditions(self) -> Reply:
        if self._index is None:
            return {"conditions": {}}
        from kerneltune.measure.conditions import read

        return {"conditions": read(self._index, self._flush).to_dict()}

    def _ceilings(self) -> Reply:
        if self._index is None:
            raise RuntimeError("no GPU: ceilings are measured, never assumed")
        from kerneltune.measure.ceilings import measure_ceilings

        return {"ceilings": measure_ceilings(self._index).to_dict()}

    def _prepare(self, workload: Workload, seed: int) -> Reply:
        from kerneltune.measure.gate import make_cases

        begin = time.perf_counter()
        self._cases = []  # free the former before making the next
        self._cases = make_cases(self._tunable, workload, self._device, seed)
        return {"prepare_s": time.perf_counter() - begin}

    def _trial(
        self,
        part: str,
        config: Config,
        stop_above_us: float | None,
        samples: int,
        budget_s: float,
        gate: bool,
        raw: bool,
    ) -> Reply:
        from kerneltune.measure import gate as gates
        from kerneltune.measure.timing import time_launch

        reply: Reply = {"launch_us": self._launch_us}
        begin = time.perf_counter()
        if gate:
            verdict = gates.check(self._tunable, self._cases, config)
            reply |= {"error": verdict.error, "gate_s": time.perf_counter() - begin}
            if not verdict.ok:
                return reply | {"outcome": "wrong", "reason": verdict.reason}
        if samples == 0:
            return reply
        begin = time.perf_counter()
        whole, timed = self._launches(config, part)
        timing = time_launch(
            timed.run, flush=self._flush, samples=samples, budget_s=budget_s, stop_above_us=stop_above_us
        )
        reply |= _timing_reply(timing)
        if raw:
            reply["samples_us"] = list(timing.samples_us)
        if gate:
            reply |= self._after_timing([whole], timed is not whole)[0]
        return reply | {"timing_s": time.perf_counter() - begin}

    def _launches(self, config: Config, part: str) -> tuple[Launch, Launch]:
        """The whole operation, run once on poisoned memory, and what to time of it."""
        from kerneltune.measure.gate import run_poisoned

        if self._index is None:
            raise RuntimeError("no GPU: nothing is timed here")
        problem = self._cases[0].problem
        whole = self._tunable.launch(problem, config)
        run_poisoned(whole)
        one_part = part and len(self._tunable.parts) > 1
        return whole, self._tunable.launch(problem, config, part) if one_part else whole

    def _after_timing(self, launches: Sequence[Launch], rerun: bool) -> list[Reply]:
        """For each launch {} if its outputs are still right after all the replays, else a "wrong" without times.

        Args:
            rerun: only a part was timed: run the whole once more, on what the replays left behind.
        """
        from kerneltune.measure import gate as gates

        replies: list[Reply] = []
        for launch in launches:
            if rerun:
                launch.run()
            verdict = gates.judge(self._tunable, self._cases[0], launch)
            replies.append({} if verdict.ok else _wrong_after_timing(verdict))
        gates.require_unchanged(self._cases)
        return replies

    def _vet(self, config: Config, edges: Edges, seed: int) -> Reply:
        """The gate, the same bits in several launches, and the gate on edge sizes."""
        from kerneltune.measure import gate as gates

        begin = time.perf_counter()
        verdict = gates.check(self._tunable, self._cases, config)
        reply: Reply = {"launch_us": self._launch_us, "error": verdict.error}
        if not verdict.ok:
            reply |= {"outcome": "wrong", "reason": verdict.reason}
        elif varies := self._varies(config):
            reply |= {"outcome": "nondeterministic", "reason": varies}
        else:
            reply |= self._vet_edges(config, edges, seed)
        return reply | {"gate_s": time.perf_counter() - begin}

    def _varies(self, config: Config) -> str:
        from kerneltune.measure import gate as gates

        if not self._tunable.deterministic:
            return ""
        return gates.deterministic(self._tunable.launch(self._cases[0].problem, config), FINAL_LAUNCHES)

    def _vet_edges(self, config: Config, edges: Edges, seed: int) -> Reply:
        """{} if the config is right on every edge workload, or was before in this process."""
        from kerneltune.measure import gate as gates

        for label, workload in edges:
            size = json.dumps([dict(workload), seed], sort_keys=True)
            pair = json.dumps([config, size], sort_keys=True)
            if pair in self._vetted:
                continue
            try:
                if size not in self._edge_cases:
                    self._edge_cases[size] = gates.make_cases(self._tunable, workload, self._device, seed)
                verdict = gates.check(self._tunable, self._edge_cases[size], config)
                self._synchronize()
            except gates.MemoryChanged as error:
                raise gates.MemoryChanged(f"{label}: {error}") from None
            except Exception as error:
                reply = self._failure(error)
                return reply | {"reason": f"{label}: {reply['reason']}"}
            if not verdict.ok:
                return {"outcome": "wrong", "reason": f"{label}: {verdict.reason}", "error": verdict.error}
            self._vetted.add(pair)
        return {}

    def _interleave(self, part: str, configs: Sequence[Config], rounds: int, samples: int, seed: int) -> Reply:
        from kerneltune.measure.timing import time_interleaved

        begin = time.perf_counter()
        launches = [self._launches(config, part) for config in configs]
        timings = time_interleaved(
            [timed.run for _, timed in launches], flush=self._flush, rounds=rounds, samples_per_turn=samples, seed=seed
        )
        after = self._after_timing(
            [whole for whole, _ in launches], any(timed is not whole for whole, timed in launches)
        )
        share_s = (time.perf_counter() - begin) / len(configs)
        pairs = zip(timings, after, strict=True)
        return {"timings": [_timing_reply(timing) | wrong | {"timing_s": share_s} for timing, wrong in pairs]}


NO_TIMES: Reply = {"time_us": None, "p20_us": None, "p80_us": None, "samples": 0, "freaks": 0}


def _empty_trial() -> Reply:
    return NO_TIMES | {"error": None, "launch_us": 0.0, "gate_s": 0.0, "timing_s": 0.0}


def _timing_reply(timing: Timing) -> Reply:
    from kerneltune.measure.conditions import freaks

    return {
        "time_us": timing.time_us,
        "p20_us": timing.p20_us,
        "p80_us": timing.p80_us,
        "samples": len(timing.samples_us),
        "freaks": freaks(timing.samples_us),
    }


def _wrong_after_timing(verdict: Verdict) -> Reply:
    reason = f"after repeated launches: {verdict.reason}"
    return NO_TIMES | {"outcome": "wrong", "reason": reason, "error": verdict.error}


def _plain(config: Config) -> dict[str, Any]:
    """Mappings as dicts, so that they can be pickled."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}


def _scratch(size: int, alignment: int, stream: int | None) -> Any:
    """Global scratch memory for kernels that ask Triton for it (descriptors made on the device)."""
    import torch

    return torch.empty(size, dtype=torch.int8, device="cuda")
