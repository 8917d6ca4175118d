"""BERT with a BiLSTM: the hidden states that it reads, trained weights, and packing."""

import pytest
import torch
from torch import Tensor

from bertsmith.model.config import BiLSTMSettings
from bertsmith.model.feature_based import BertWithBiLSTM, hidden_state_indices
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from tests.model.examples import make_prime_size_config

#: Token ids and segment ids of three sequences.
SEQUENCES = [
    ([2, 17, 5, 3, 9, 3], [0, 0, 0, 0, 1, 1]), ([2, 8, 3], [0, 0, 0]), ([2, 3], [0, 0]),
]  # fmt: skip
#: All values of the setting ``features.layers``.
LAYER_CHOICES = (
    "embeddings", "second-to-last", "last", "weighted-sum-last-four", "concat-last-four",
    "weighted-sum-all",
)  # fmt: skip


def make_model(
    layers: str, *, is_sequence_level: bool = False, num_layers: int = 5
) -> BertWithBiLSTM:
    """Return a BERT with a BiLSTM and random weights, in eval mode."""
    torch.manual_seed(3)
    config = make_prime_size_config(layers=num_layers, init_range=0.3)
    features = BiLSTMSettings.parse({"layers": layers, "width": 11}, "the test")
    return BertWithBiLSTM(config, 3, features, is_sequence_level=is_sequence_level).eval()


@pytest.mark.parametrize(
    ("layers", "indices"),
    [("embeddings", [0]), ("second-to-last", [4]), ("last", [5]),
     ("concat-last-four", [2, 3, 4, 5]), ("weighted-sum-last-four", [2, 3, 4, 5]),
     ("weighted-sum-all", [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_bilstm_reads_the_hidden_states_of_table_7(layers: str, indices: list[int]) -> None:
    """The BiLSTM reads the hidden states of Table 7, and later layers do not change its output."""
    model = make_model(layers)
    all_states = [
        state.detach() for state in model.bert.iter_hidden_states(pack_sequences(SEQUENCES))
    ]
    states = [all_states[index] for index in indices]
    lstm_inputs = model._compute_lstm_inputs(pack_sequences(SEQUENCES))
    # The weights of a weighted sum are equal at first.
    expected = torch.stack(states).mean(0) if "sum" in layers else torch.cat(states, -1)
    torch.testing.assert_close(lstm_inputs, expected)
    outputs = model(pack_sequences(SEQUENCES))
    for layer in list(model.bert.encoder.layers)[indices[-1] :]:
        for parameter in layer.parameters():
            parameter.data.fill_(float("nan"))
    assert torch.equal(model(pack_sequences(SEQUENCES)), outputs)


@pytest.mark.parametrize("layers", LAYER_CHOICES)
@pytest.mark.parametrize("is_sequence_level", [True, False])
def test_frozen_encoder_gets_no_gradients(layers: str, is_sequence_level: bool) -> None:
    """With a frozen encoder, exactly the parameters outside of the encoder have a gradient."""
    model = make_model(layers, is_sequence_level=is_sequence_level).train()
    outputs = model(pack_sequences(SEQUENCES), None, DropoutSeed(torch.tensor(1)))
    outputs.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("bert."):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("is_sequence_level", [True, False])
def test_outputs_do_not_depend_on_the_batch(is_sequence_level: bool) -> None:
    """A sequence has the same outputs alone and in a batch with other sequences."""
    model = make_model("concat-last-four", is_sequence_level=is_sequence_level)
    batched = model(pack_sequences(SEQUENCES))
    separate = torch.cat([model(pack_sequences([sequence])) for sequence in SEQUENCES])
    torch.testing.assert_close(batched, separate, rtol=0, atol=1e-5)


def test_token_indices_select_outputs() -> None:
    """With ``token_indices``, the model returns the outputs of these tokens."""
    model = make_model("last")
    indices = torch.tensor([0, 3, 7])
    torch.testing.assert_close(
        model(pack_sequences(SEQUENCES), indices), model(pack_sequences(SEQUENCES))[indices]
    )


def test_frozen_encoder_has_no_dropout() -> None:
    """The hidden states of a frozen encoder are the same in train and eval mode."""
    model = make_model("last")
    expected: Tensor = model._compute_lstm_inputs(pack_sequences(SEQUENCES))
    model.train()
    assert torch.equal(model._compute_lstm_inputs(pack_sequences(SEQUENCES)), expected)
    first, second = (
        model(pack_sequences(SEQUENCES), None, DropoutSeed(torch.tensor(seed))) for seed in (1, 2)
    )
    assert not torch.equal(first, second)


def test_last_four_layers_of_a_three_layer_model_are_rejected() -> None:
    """Reading the last four layers of a model with three layers is an error."""
    with pytest.raises(ValueError, match="'concat-last-four', but the model has 3"):
        hidden_state_indices(BiLSTMSettings(), 3)


def test_unfrozen_encoder_is_trained() -> None:
    """An unfrozen encoder has dropout, and gradients up to the last layer that is read."""
    torch.manual_seed(3)
    config = make_prime_size_config(layers=5, init_range=0.3)
    settings = {"layers": "second-to-last", "width": 11}
    trained = BertWithBiLSTM(
        config,
        3,
        BiLSTMSettings.parse({**settings, "frozen": False}, "the test"),
        is_sequence_level=False,
    )
    frozen = BertWithBiLSTM(
        config, 3, BiLSTMSettings.parse(settings, "the test"), is_sequence_level=False
    )
    frozen.load_state_dict(trained.state_dict())
    batch = pack_sequences(SEQUENCES)
    assert torch.equal(trained.eval()(batch), frozen.eval()(batch))
    first, second = (
        trained.train()._compute_lstm_inputs(batch, DropoutSeed(torch.tensor(seed)))
        for seed in (1, 2)
    )
    assert not torch.equal(first, second)
    trained(batch, None, DropoutSeed(torch.tensor(1))).square().sum().backward()
    for number, layer in enumerate(trained.bert.encoder.layers, start=1):
        has_gradient = any(parameter.grad is not None for parameter in layer.parameters())
        # The BiLSTM reads the second to last layer of five.
        assert has_gradient == (number <= 4), number
    assert trained.bert.embeddings.words.weight.grad is not None


def test_fixed_positions_stay_fixed() -> None:
    """Sinusoidal positions are not trained with an unfrozen encoder."""
    config = make_prime_size_config(positions="sinusoidal")
    features = BiLSTMSettings(layers="last", width=11, frozen=False)
    model = BertWithBiLSTM(config, 3, features, is_sequence_level=False)
    assert not model.bert.embeddings.positions.weight.requires_grad
    assert model.bert.embeddings.words.weight.requires_grad
