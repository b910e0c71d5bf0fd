"""Who the GPU is: the one that is here, or a named one that is not, and which software would drive it.

`detect` asks torch about a GPU of this machine; `target` answers for a GPU that need not be here, so that spaces can be
filtered and kernels compiled without it. Limits: `TARGETS` holds one product of each architecture; pass a `Device` of
your own where another product matters.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

from kerneltune import __version__
from kerneltune.errors import UserError
from kerneltune.kernels.device import Device

# SMs and caches from the vendors' architecture papers; bytes of shared memory one block may opt in to from the CUDA
# programming guide's table of compute capabilities (163, 99 and 227 KiB) and AMD's CDNA3 and CDNA4 papers (64 and
# 160 KiB of LDS).
TARGETS: dict[str, Device] = {
    # read with torch.cuda.get_device_properties on one, driver 580
    "sm_90": Device("NVIDIA H200", "sm_90", 132, 232448, 62914560, 150754820096),
    # NVIDIA A100 Tensor Core GPU Architecture: 108 SMs, 40 MB L2, 80 GB
    "sm_80": Device("NVIDIA A100-SXM4-80GB", "sm_80", 108, 166912, 41943040, 85899345920),
    # NVIDIA L40S datasheet and Ada architecture paper: 142 SMs, 96 MB L2, 48 GB
    "sm_89": Device("NVIDIA L40S", "sm_89", 142, 101376, 100663296, 51539607552),
    # NVIDIA Blackwell architecture brief: 148 SMs in two dies, 126 MB L2, 180 GB
    "sm_100": Device("NVIDIA B200", "sm_100", 148, 232448, 132120576, 193273528320),
    # NVIDIA RTX Blackwell architecture paper: 170 SMs, 96 MB L2, 32 GB
    "sm_120": Device("NVIDIA GeForce RTX 5090", "sm_120", 170, 101376, 100663296, 34359738368),
    # AMD CDNA3 paper: 304 CUs, 256 MB of Infinity Cache in front of 192 GB
    "gfx942": Device("AMD Instinct MI300X", "gfx942", 304, 65536, 268435456, 206158430208, warp_size=64),
    # AMD CDNA4 paper: 256 CUs, 256 MB of Infinity Cache in front of 288 GB
    "gfx950": Device("AMD Instinct MI355X", "gfx950", 256, 163840, 268435456, 309237645312, warp_size=64),
}


def target(arch: str) -> Device:
    """The device that stands for an architecture: "sm_90" is an H200.

    Raises:
        UserError: unknown architecture; the message lists the known ones.
    """
    if arch not in TARGETS:
        known = ", ".join(f"{name} ({device.name})" for name, device in TARGETS.items())
        raise UserError(f"unknown target {arch!r}: expected one of {known}")
    return TARGETS[arch]


def detect(index: int = 0) -> Device | None:
    """GPU `index` of this machine, or None where torch sees no GPU at all.

    Raises:
        UserError: there are GPUs, but not this one.
    """
    import torch

    from kerneltune.kernels.device import current_device

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise UserError(f"GPU {index} is not there: torch sees {count} (numbered from 0)")
    return current_device(index)


def slug(name: str) -> str:
    """A device's name as a folder or file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions(device_index: int | None = None) -> dict[str, str]:
    """The software that a time depends on: python, kerneltune, triton, torch, cuda (or hip), and the GPU's driver.

    What is not there (a driver on a machine without a GPU) is left out. Imports neither torch nor triton. With
    `device_index` (NVML's numbering) the card's firmware is named too, as `vbios`.
    """
    found = {"kerneltune": __version__, "python": platform.python_version()}
    for package in ("triton", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found |= _torch_toolkit()
    return found | _nvidia_driver(device_index)


def _torch_toolkit() -> dict[str, str]:
    """The toolkit that torch was built with, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))


def _nvidia_driver(device_index: int | None) -> dict[str, str]:
    """NVML's view, else what the kernel module says; empty where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: all mean that NVML cannot be asked
        return _kernel_module()
    try:
        found = {"driver": _text(pynvml.nvmlSystemGetDriverVersion())}
        if device_index is not None:
            handle = pynvml.nvmlDeviceGetHandleByIndex(device_index)
            with contextlib.suppress(pynvml.NVMLError):  # a virtual machine may not be told
                found["vbios"] = _text(pynvml.nvmlDeviceGetVbiosVersion(handle))
        return found
    except pynvml.NVMLError:
        return _kernel_module()
    finally:
        pynvml.nvmlShutdown()


def _kernel_module() -> dict[str, str]:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return {}
    return {"driver": found[1]} if found else {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
