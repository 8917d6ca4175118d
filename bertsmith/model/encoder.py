"""One layer of the Transformer encoder, and the stack of them.

It never knows of words, nor of what the last layer is used for.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from bertsmith.model.attention import Layout, SelfAttention
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.ops.dropout import Dropout, DropoutSeed
from bertsmith.model.ops.linear import Linear
from bertsmith.model.ops.norms import build_norm

#: Dropout sites of a layer: attention probabilities, attention output, feed-forward output.
DROPOUTS_PER_LAYER = 3


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a residual sum and LayerNorm.

    Post-norm: x = norm(x + dropout(f(x))), and so with batch norm or none in LayerNorm's place.
    Pre-norm: x = x + dropout(f(norm(x))).
    """

    def __init__(self, config: ModelConfig, first_site: int) -> None:
        """``first_site`` is the first of SITES_PER_LAYER dropout sites."""
        super().__init__()
        self.post = config.norm != "pre"
        self.attention = SelfAttention(config, first_site)
        self.attention_dropout = Dropout(config.dropout, first_site + 1)
        self.attention_norm = build_norm(config)
        self.up = Linear(config.width, config.feed_forward)
        self.activation = ACTIVATIONS[config.activation]
        self.down = Linear(config.feed_forward, config.width)
        self.feed_forward_dropout = Dropout(config.dropout, first_site + 2)
        self.feed_forward_norm = build_norm(config)

    def forward(
        self, x: Tensor, where: Layout, noise: DropoutSeed | None, places: Tensor | None = None
    ) -> Tensor:
        """[T, D] -> [T, D], or [M, D] for ``places``, int64 [M] of the T tokens.

        After attention no token sees another: what nobody asks about is not computed.
        """
        normed = x if self.post else self.attention_norm(x)
        attended = self.attention_dropout(self.attention(normed, where, noise, places), noise)
        x = (x if places is None else x.index_select(0, places)) + attended
        if self.post:
            x = self.attention_norm(x)
            result: Tensor = self.feed_forward_norm(x + self._feed_forward(x, noise))
            return result
        return x + self._feed_forward(self.feed_forward_norm(x), noise)

    def probabilities(self, x: Tensor, where: Layout) -> list[Tensor]:
        """[T, D], what the layer is given -> its heads' probabilities of each sequence."""
        normed = x if self.post else self.attention_norm(x)
        found: list[Tensor] = self.attention.probabilities(normed, where)
        return found

    def _feed_forward(self, x: Tensor, noise: DropoutSeed | None) -> Tensor:
        down = self.down(self.activation(self.up(x)))
        dropped: Tensor = self.feed_forward_dropout(down, noise)
        return dropped


class Encoder(nn.Module):
    """L layers, and for pre-norm the LayerNorm that ends them."""

    def __init__(self, config: ModelConfig, first_site: int) -> None:
        """``first_site`` is the first dropout site of the first layer."""
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config, first_site + index * DROPOUTS_PER_LAYER)
            for index in range(config.layers)
        )
        pre = config.norm == "pre"
        self.norm = build_norm(config) if pre else nn.Identity()
        # Batch norm's statistics are to be those of all tokens, whatever is asked for.
        self._whole = config.norm == "batch"

    def each(
        self,
        x: Tensor,
        where: Layout,
        noise: DropoutSeed | None,
        places: Tensor | None = None,
        depth: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the output [T, D] of layer after layer; a caller that stops saves the rest.

        ``depth``: how many layers there are to be, None for all. ``places``, int64 [M]: what is
        asked of the last of those, whose output is then [M, D].
        """
        last, asked = self.layers[-1], list(self.layers)[:depth]
        for number, layer in enumerate(asked, 1):
            chosen = places if number == len(asked) else None
            if self._whole and chosen is not None:
                x = layer(x, where, noise).index_select(0, chosen)
            else:
                x = layer(x, where, noise, chosen)
            yield self.norm(x) if layer is last else x
