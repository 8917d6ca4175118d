"""CPU features that determine which kernels are fastest."""

from functools import cache

import torch


def has_bf16() -> bool:
    """Return whether this CPU has bf16 instructions; without them, bf16 is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def has_vnni() -> bool:
    """Return whether this CPU has instructions that sum 8-bit products in 32 bits (VNNI or AMX).

    Other CPUs sum them in 16 bits, which may saturate.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


@cache
def has_onednn_linear() -> bool:
    """Return whether this build of PyTorch can call oneDNN's linear layer."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def has_onednn_bf16() -> bool:
    """Return whether oneDNN's linear layer supports bf16 on this CPU; it needs AVX-512.

    On other CPUs, PyTorch multiplies bf16 matrices without oneDNN.
    """
    return has_onednn_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - there is no public function


@cache
def has_slow_mkl() -> bool:
    """Return whether MKL is slow on this CPU and oneDNN is available instead.

    MKL uses AVX-512 only on Intel CPUs. On AMD CPUs with AVX-512 (Zen 4 and later) it runs at half
    the possible speed.
    """
    if not has_onednn_linear():
        return False
    capabilities = torch.cpu.get_capabilities()
    is_amd = str(capabilities.get("cpu_name", "")).startswith("AMD")
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return is_amd and bool(capabilities.get("avx512_f")) and has_mkl
