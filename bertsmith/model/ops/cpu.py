"""What the CPU's instructions are good for.

It never knows what is computed.
"""

from functools import cache

import torch


def has_bf16() -> bool:
    """Tell whether this CPU multiplies bf16 itself: emulated, it is slower than float32."""
    facts = torch.cpu.get_capabilities()
    return bool(facts.get("avx512_bf16") or facts.get("amx_bf16"))


def has_vnni() -> bool:
    """Tell whether this CPU adds up products of 8 bits in 32: others do it in 16, and may clip."""
    facts = torch.cpu.get_capabilities()
    return any(facts.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


@cache
def has_slow_mkl() -> bool:
    """Tell whether MKL leaves half of this CPU idle: it keeps AVX-512 to Intel's own.

    So it is with AMD's that have AVX-512, Zen 4 and later; docs/measurements.md has by how much.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        # Nothing else could take its place.
        return False
    facts = torch.cpu.get_capabilities()
    named = str(facts.get("cpu_name", "")).startswith("AMD")
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return named and bool(facts.get("avx512_f")) and mkl
