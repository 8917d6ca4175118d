"""AdamW or Muon, with parameter groups as in the original BERT code."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bertsmith.train.engine.muon import Muon
from bertsmith.train.engine.settings import OptimSettings

#: Part of the names of the encoder layers' parameters.
_LAYERS = "encoder.layers."
#: End of the name of the weight with the matrices of queries, keys and values.
_QUERY_KEY_VALUE = "query_key_value.weight"


class Optimizer(Protocol):
    """The interface of the optimizers in this module, and of those of PyTorch.

    Attributes:
        param_groups: Parameter groups, as in PyTorch. A group with the key ``lr_factor`` has the
            learning rate of the schedule multiplied by this factor.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any:
        """The state of each parameter: a mapping from parameters to named tensors."""

    def step(self) -> object:
        """Update all parameters."""

    def zero_grad(self) -> None:
        """Remove the gradients of all parameters."""


class MuonWithAdamW:
    """Muon for some parameters and AdamW for the others, as one optimizer.

    Both store the states of their parameters in the same mapping.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon_groups: list[dict[str, Any]]) -> None:
        """Combine ``adamw`` with a Muon for the parameters of ``muon_groups``."""
        self.state = adamw.state
        self._adamw = adamw
        self._muon = Muon(muon_groups, self.state)
        self.param_groups = [*adamw.param_groups, *self._muon.param_groups]

    @property
    def found_inf(self) -> Tensor | None:
        """float32 []; if it is not 0, the next step changes nothing."""
        return self._muon.found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor) -> None:
        # The attribute that torch.amp.GradScaler sets.
        self._adamw.found_inf = value  # type: ignore[attr-defined]
        self._muon.found_inf = value

    def step(self) -> None:
        """Update all parameters."""
        self._adamw.step()
        self._muon.step()

    def zero_grad(self) -> None:
        """Remove the gradients of all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay applies to the parameter ``name``.

    It applies to all parameters except biases, LayerNorm and the layer-mixing weights.
    """
    last_part = name.rpartition(".")[2]
    return not last_part.startswith(("bias", "layer_")) and "norm." not in name


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a weight matrix of an encoder layer."""
    return _LAYERS in name and parameter.ndim == 2


def build_optimizer(
    model: nn.Module, settings: OptimSettings, matmul_dtype: torch.dtype = torch.float32
) -> Optimizer:
    """Return the optimizer of the trainable parameters, with weight decay only where it applies.

    The first parameter group of AdamW (Loshchilov and Hutter 2019) has weight decay, the second
    has none. With Muon, further groups hold the weight matrices of the encoder layers.

    Args:
        model: Model to train.
        settings: The optimizer and its hyperparameters.
        matmul_dtype: Dtype of Muon's matrix products: float32 or bfloat16.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [
        (name, p)
        for name, p in trainable
        if settings.optimizer == "muon" and is_hidden_matrix(name, p)
    ]
    matrix_names = {name for name, _ in matrices}
    others = [(name, p) for name, p in trainable if name not in matrix_names]
    groups = [
        {
            "params": [p for name, p in others if has_weight_decay(name)],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for name, p in others if not has_weight_decay(name)], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    if settings.optimizer == "adamw":
        return adamw
    return MuonWithAdamW(adamw, _build_muon_groups(matrices, settings, matmul_dtype))


def can_skip_step(device: torch.device) -> bool:
    """Return whether the device can skip a step of an optimizer, without the CPU waiting for it.

    On the CPU there is nothing to wait for.
    """
    return device.type == "cuda"


def skip_step_if(optimizer: Optimizer, condition: Tensor) -> None:
    """Make the next step of an optimizer change nothing if ``condition``, bool [], is true.

    PyTorch's fused AdamW and Muon support this, for gradient scaling.
    """
    optimizer.found_inf = condition.float()  # type: ignore[attr-defined]


def _build_muon_groups(
    matrices: list[tuple[str, nn.Parameter]], settings: OptimSettings, matmul_dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return Muon's groups: the weights of queries, keys and values, and all other matrices."""
    fused = [p for name, p in matrices if name.endswith(_QUERY_KEY_VALUE)]
    single = [p for name, p in matrices if not name.endswith(_QUERY_KEY_VALUE)]
    common = {
        "lr": settings.lr * settings.muon_lr_factor,
        "lr_factor": settings.muon_lr_factor,
        "weight_decay": settings.weight_decay,
        "momentum": settings.muon_momentum,
        "num_iterations": settings.muon_iterations,
        "matmul_dtype": matmul_dtype,
    }
    return [
        {"params": fused, "num_matrices": 3, **common},
        {"params": single, "num_matrices": 1, **common},
    ]


def iter_moment_names(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, tuple[str, ...]]]:
    """Yield each parameter of an optimizer with the names of its moments.

    The moments are the state tensors with the shape of the parameter, without Adam's step count.
    """
    for group in optimizer.param_groups:
        names = ("momentum_buffer",) if "momentum" in group else ("exp_avg", "exp_avg_sq")
        for parameter in group["params"]:
            yield parameter, names
