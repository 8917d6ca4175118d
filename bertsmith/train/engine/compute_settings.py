"""How the steps of any training run are computed: the settings' types, limits and usual values.

It never says in which order a run's settings stand, nor what they make the machine do.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Precision = Literal["auto", "fp32", "bf16"]
Kernel = Literal["auto", "reference", "padded", "varlen"]
#: None: as many as PyTorch takes.
Threads = Annotated[int, Field(ge=1)] | None
#: The most tokens computed at once; a larger batch is accumulated piece by piece.
MicroTokens = Annotated[int, Field(ge=64)]
MICRO_TOKENS: Final = 16384
#: Steps between two lines of the journal.
LogEvery = Annotated[int, Field(ge=1)]
LOG_EVERY: Final = 10
