"""Types of the JSON responses, for the OpenAPI schema.

The endpoints serialize their responses without these types; a test validates real responses against
the schema.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, WithJsonSchema, with_config

# Before Python 3.12, pydantic does not support typing.TypedDict.
from typing_extensions import TypedDict

from bertsmith.serve.errors import ERROR_TYPE_BY_STATUS
from bertsmith.use.answer import Candidate
from bertsmith.use.fill import Filling
from bertsmith.use.pair import NextSentencePrediction
from bertsmith.use.tag import Span

Vector = list[float]
Matrix = list[list[float]]
#: Similarities of a sentence to others, or of all pairs of texts.
Similarities = Vector | Matrix


@with_config(ConfigDict(extra="forbid"))
class _StrictDict(TypedDict):
    """A JSON object that has no other fields than those of its type."""


class ErrorDetails(_StrictDict):
    """An error."""

    message: Annotated[str, Field(description="What is wrong, and what to do.")]
    type: Annotated[str, WithJsonSchema({"enum": sorted({*ERROR_TYPE_BY_STATUS.values()})})]
    code: Annotated[int, Field(description="The HTTP status.")]
    param: None


class ErrorResponse(_StrictDict):
    """The body of every response with status 400 or above, in the format of OpenAI's API."""

    error: ErrorDetails


class Status(_StrictDict):
    """The state of the server."""

    status: Literal["ok", "ready"]


class SparseEntry(_StrictDict):
    """A vocabulary entry with a weight above 0."""

    index: Annotated[int, Field(description="Token id.")]
    value: Annotated[float, Field(description="Weight.")]


class EmbeddingItem(_StrictDict):
    """The vector of a text."""

    object: Literal["embedding"]
    index: Annotated[int, Field(description="Index of the text in the request.")]
    embedding: Annotated[
        Vector | str, Field(description="Numbers, or little-endian float32 in base64.")
    ]


class EmbeddingUsage(_StrictDict):
    """Tokens of the request's texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_StrictDict):
    """Response of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class OpenAiModel(_StrictDict):
    """A model, as OpenAI's API describes it."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="Unix time at which the server loaded the model.")]
    owned_by: str


class OpenAiModelList(_StrictDict):
    """Response of GET /v1/models."""

    object: Literal["list"]
    data: list[OpenAiModel]


class ModelDescription(_StrictDict):
    """A loaded model. Only fine-tuned models have the fields kind, labels and label_names."""

    name: str
    tasks: Annotated[
        list[str],
        Field(
            description="Endpoints that the model supports; inspect: /attention and "
            "/word_distances."
        ),
    ]
    num_layers: int
    num_heads: int
    hidden_size: int
    vocab_size: int
    max_seqlen: Annotated[int, Field(description="Maximum tokens, including [CLS] and [SEP].")]
    kind: NotRequired[str]
    labels: NotRequired[list[str]]
    label_names: NotRequired[
        Annotated[dict[str, str], Field(description="Meaning of labels, where it is known.")]
    ]


class ModelInfo(_StrictDict):
    """Response of GET /info, as in text-embeddings-inference."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class Token(_StrictDict):
    """A token of a text."""

    id: int
    text: str
    special: Annotated[bool, Field(description="Whether the token is an added [CLS] or [SEP].")]
    start: Annotated[int | None, Field(description="Index of the first character in the text.")]
    stop: Annotated[int | None, Field(description="Index after the last character.")]


class FilledText(_StrictDict):
    """Predictions for a text."""

    masks: list[Filling]


class LabelScore(_StrictDict):
    """A label with its probability."""

    label: str
    score: float


class Labels(_StrictDict):
    """Prediction of a classifier."""

    labels: Annotated[list[LabelScore], Field(description="Most probable label first.")]
    truncated: bool


class Score(_StrictDict):
    """Prediction of a regression model."""

    score: float
    truncated: bool


class AnswerResult(_StrictDict):
    """The answer to a question; start and end are null if the context does not answer it."""

    text: str
    start: int | None
    end: int | None
    score: Annotated[float, Field(description="Sum of the start logit and the end logit.")]
    probability: float
    null_score_diff: Annotated[
        float | None, Field(description='Score of "no answer" minus the score of the best span.')
    ]
    truncated: Annotated[bool, Field(description="Whether the question was truncated.")]
    candidates: Annotated[list[Candidate], Field(description="The five best spans.")]


class ChoiceResult(_StrictDict):
    """The choice for a prompt."""

    probabilities: Annotated[Vector, Field(description="Probability of each ending.")]
    best_index: Annotated[int, Field(description="Index of the most probable ending.")]
    truncated: bool


class RankedText(_StrictDict):
    """A text in the order of relevance; ``text`` is sent only with return_text."""

    index: Annotated[int, Field(description="Index of the text in the request.")]
    score: float
    text: NotRequired[str]


class DocumentText(_StrictDict):
    """A document of the request."""

    text: str


class RankedDocument(_StrictDict):
    """A document in the order of relevance; ``document`` is sent only with return_documents."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    relevance_score: float
    document: NotRequired[DocumentText]


class RankingUsage(_StrictDict):
    """Tokens of the request's texts."""

    total_tokens: int


class Ranking(_StrictDict):
    """Response of POST /v1/rerank, as in Cohere's and Jina's API."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RankingUsage


class Occurrence(_StrictDict):
    """An occurrence of a word in a text."""

    text_index: int
    start: Annotated[int, Field(description="Index of the first character.")]
    end: Annotated[int, Field(description="Index after the last character.")]


class LayerDistances(_StrictDict):
    """Cosine distances of the vectors of all occurrences in a layer."""

    layer: int
    distances: Matrix


class WordDistances(_StrictDict):
    """Response of POST /word_distances."""

    word: str
    occurrences: list[Occurrence]
    layers: list[LayerDistances]


class AttentionMap(_StrictDict):
    """Attention probabilities of a head; rows are query tokens."""

    layer: int
    head: int
    probabilities: Matrix


class AttentionResult(_StrictDict):
    """Response of POST /attention."""

    tokens: list[str]
    segments: list[int]
    num_removed_tokens: int
    maps: list[AttentionMap]


class AttributionsResult(_StrictDict):
    """Response of POST /attributions."""

    label: Annotated[str | None, Field(description="Null for a regression model.")]
    score: Annotated[float, Field(description="Probability of the label, or the output.")]
    tokens: list[str]
    segments: list[int]
    attributions: Annotated[
        Vector, Field(description="Score minus the score if the token is replaced by [MASK].")
    ]
    truncated: bool


class InferenceAnswer(_StrictDict):
    """An answer, in the format of Hugging Face's inference API."""

    answer: str
    score: float
    start: int
    end: int


class InferenceFilling(_StrictDict):
    """A prediction for a [MASK], in the format of Hugging Face's inference API."""

    score: float
    token: int
    token_str: str
    sequence: str


class InferenceEntity(_StrictDict):
    """An entity, in the format of Hugging Face's inference API."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


#: Responses of POST /: a list of labels per text, an answer, predictions for one or several masks
#: of one or several texts, entities of one or several texts, similarities, or a vector per text.
InferenceResult = (
    list[list[LabelScore]]
    | InferenceAnswer
    | list[InferenceFilling]
    | list[list[InferenceFilling]]
    | list[list[InferenceFilling] | list[list[InferenceFilling]]]
    | list[InferenceEntity]
    | list[list[InferenceEntity]]
    | Similarities
)
FillResult = FilledText | list[FilledText]
PairResult = NextSentencePrediction | list[NextSentencePrediction]
ClassifyResult = Labels | Score | list[Labels | Score]
PredictResult = list[LabelScore] | list[list[LabelScore]]
TagResult = list[Span] | list[list[Span]]
AnswerResults = AnswerResult | list[AnswerResult]
ChooseResults = ChoiceResult | list[ChoiceResult]
