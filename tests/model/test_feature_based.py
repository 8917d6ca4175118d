"""The frozen encoder and its BiLSTM: which layers are read, what learns, what packing changes."""

import pytest
import torch
from torch import Tensor

from bertsmith.model.config import FeatureSettings
from bertsmith.model.feature_based import BertWithBiLSTM, hidden_state_indices
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from tests.model.examples import prime_config

ROWS = [([2, 17, 5, 3, 9, 3], [0, 0, 0, 0, 1, 1]), ([2, 8, 3], [0, 0, 0]), ([2, 3], [0, 0])]
NAMES = (
    "embeddings", "second-to-last", "last", "weighted-sum-last-four", "concat-last-four",
    "weighted-sum-all",
)  # fmt: skip


def made(layers: str, *, whole: bool = False, depth: int = 5) -> BertWithBiLSTM:
    """Return a random model of ``depth`` layers."""
    torch.manual_seed(3)
    config = prime_config(layers=depth, init_range=0.3)
    features = FeatureSettings.parse({"layers": layers, "width": 11}, "the test")
    return BertWithBiLSTM(config, 3, features, is_sequence_level=whole).eval()


@pytest.mark.parametrize(
    ("layers", "states"),
    [("embeddings", [0]), ("second-to-last", [4]), ("last", [5]),
     ("concat-last-four", [2, 3, 4, 5]), ("weighted-sum-last-four", [2, 3, 4, 5]),
     ("weighted-sum-all", [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_the_states_of_table_7(layers: str, states: list[int]) -> None:
    """What the BiLSTM reads is made of those states alone; those above are not even computed."""
    model = made(layers)
    all_states = [state.detach() for state in model.bert.hidden_states(pack_sequences(ROWS))]
    used = [all_states[number] for number in states]
    found = model._mixed(pack_sequences(ROWS))
    wanted = torch.stack(used).mean(0) if "sum" in layers else torch.cat(used, -1)
    torch.testing.assert_close(found, wanted)
    before = model(pack_sequences(ROWS))
    for layer in list(model.bert.encoder.layers)[states[-1] :]:
        for parameter in layer.parameters():
            parameter.data.fill_(float("nan"))
    assert torch.equal(model(pack_sequences(ROWS)), before)


@pytest.mark.parametrize("layers", NAMES)
@pytest.mark.parametrize("whole", [True, False])
def test_the_encoder_stays_and_the_rest_learns(layers: str, whole: bool) -> None:
    """Every parameter outside the encoder gets a gradient, and none inside it."""
    model = made(layers, whole=whole).train()
    model(pack_sequences(ROWS), None, DropoutSeed(torch.tensor(1))).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("bert."):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("whole", [True, False])
def test_neighbours_in_the_batch_change_nothing(whole: bool) -> None:
    """Each sequence alone gives what it gives among others of other lengths."""
    model = made("concat-last-four", whole=whole)
    together = model(pack_sequences(ROWS))
    alone = torch.cat([model(pack_sequences([row])) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_places_pick_rows() -> None:
    """Outputs at places are those rows of all outputs."""
    model = made("last")
    places = torch.tensor([0, 3, 7])
    torch.testing.assert_close(
        model(pack_sequences(ROWS), places), model(pack_sequences(ROWS))[places]
    )


def test_dropout_is_off_in_the_encoder() -> None:
    """In training the features are the same as in evaluation; only the BiLSTM's way has noise."""
    model = made("last")
    wanted: Tensor = model._mixed(pack_sequences(ROWS))
    model.train()
    assert torch.equal(model._mixed(pack_sequences(ROWS)), wanted)
    one, two = (
        model(pack_sequences(ROWS), None, DropoutSeed(torch.tensor(seed))) for seed in (1, 2)
    )
    assert not torch.equal(one, two)


def test_four_layers_of_three_are_refused() -> None:
    """The setting and the model's depth are named."""
    with pytest.raises(ValueError, match="'concat-last-four', but the model has 3"):
        hidden_state_indices(FeatureSettings(), 3)


def test_unfrozen_the_encoder_learns_too() -> None:
    """Every layer that is read gets a gradient and drops; frozen and not, eval says the same."""
    torch.manual_seed(3)
    config = prime_config(layers=5, init_range=0.3)
    told = {"layers": "second-to-last", "width": 11}
    free = BertWithBiLSTM(
        config,
        3,
        FeatureSettings.parse({**told, "frozen": False}, "the test"),
        is_sequence_level=False,
    )
    frozen = BertWithBiLSTM(
        config, 3, FeatureSettings.parse(told, "the test"), is_sequence_level=False
    )
    frozen.load_state_dict(free.state_dict())
    assert torch.equal(free.eval()(pack_sequences(ROWS)), frozen.eval()(pack_sequences(ROWS)))
    mixed = [
        free.train()._mixed(pack_sequences(ROWS), DropoutSeed(torch.tensor(seed)))
        for seed in (1, 2)
    ]
    assert not torch.equal(*mixed)
    free(pack_sequences(ROWS), None, DropoutSeed(torch.tensor(1))).square().sum().backward()
    for number, layer in enumerate(free.bert.encoder.layers, 1):
        read = any(own.grad is not None for own in layer.parameters())
        assert read == (number <= 4), number
    assert free.bert.embeddings.words.weight.grad is not None
