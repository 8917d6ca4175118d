"""Types and defaults of the compute settings that pre-training and fine-tuning share."""

from typing import Annotated, Final, Literal

from pydantic import Field

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Precision = Literal["auto", "fp32", "bf16"]
Kernel = Literal["auto", "reference", "padded", "varlen"]
#: CPU threads; None: PyTorch's default.
Threads = Annotated[int, Field(ge=1)] | None
#: Maximum tokens of a micro-batch. Larger batches are split into several micro-batches.
MicroBatchTokens = Annotated[int, Field(ge=64)]
DEFAULT_MICRO_BATCH_TOKENS: Final = 16384
#: Steps between two training lines of the metrics log.
LogEvery = Annotated[int, Field(ge=1)]
DEFAULT_LOG_EVERY: Final = 10
