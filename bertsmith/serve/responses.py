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

#: Responses have no other fields than those of their types.
_exact = with_config(ConfigDict(extra="forbid"))

Vector = list[float]
Matrix = list[list[float]]
#: Similarities of a sentence to others, or of all pairs of texts.
Similarities = Vector | Matrix


@_exact
class ErrorDetails(TypedDict):
    """An error."""

    message: Annotated[str, Field(description="What is wrong, and what to do.")]
    type: Annotated[str, WithJsonSchema({"enum": sorted({*ERROR_TYPE_BY_STATUS.values()})})]
    code: Annotated[int, Field(description="The HTTP status.")]
    param: None


@_exact
class ErrorResponse(TypedDict):
    """The body of every response with status 400 or above, in the format of OpenAI's API."""

    error: ErrorDetails


@_exact
class Status(TypedDict):
    """The state of the server."""

    status: Literal["ok", "ready"]


@_exact
class SparseEntry(TypedDict):
    """A vocabulary entry with a weight above 0."""

    index: Annotated[int, Field(description="Token id.")]
    value: Annotated[float, Field(description="Weight.")]


@_exact
class EmbeddingItem(TypedDict):
    """The vector of a text."""

    object: Literal["embedding"]
    index: Annotated[int, Field(description="Index of the text in the request.")]
    embedding: Annotated[
        Vector | str, Field(description="Numbers, or little-endian float32 in base64.")
    ]


@_exact
class EmbeddingUsage(TypedDict):
    """Tokens of the request's texts."""

    prompt_tokens: int
    total_tokens: int


@_exact
class EmbeddingList(TypedDict):
    """Response of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


@_exact
class OpenAiModel(TypedDict):
    """A model, as OpenAI's API describes it."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="Unix time at which the server loaded the model.")]
    owned_by: str


@_exact
class OpenAiModelList(TypedDict):
    """Response of GET /v1/models."""

    object: Literal["list"]
    data: list[OpenAiModel]


@_exact
class ModelDescription(TypedDict):
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


@_exact
class ModelInfo(TypedDict):
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


@_exact
class Token(TypedDict):
    """A token of a text."""

    id: int
    text: str
    special: Annotated[bool, Field(description="Whether the token is an added [CLS] or [SEP].")]
    start: Annotated[int | None, Field(description="Index of the first character in the text.")]
    stop: Annotated[int | None, Field(description="Index after the last character.")]


@_exact
class FilledText(TypedDict):
    """Predictions for a text."""

    masks: list[Filling]


@_exact
class LabelScore(TypedDict):
    """A label with its probability."""

    label: str
    score: float


@_exact
class Labels(TypedDict):
    """Prediction of a classifier."""

    labels: Annotated[list[LabelScore], Field(description="Most probable label first.")]
    truncated: bool


@_exact
class Score(TypedDict):
    """Prediction of a regression model."""

    score: float
    truncated: bool


@_exact
class AnswerResult(TypedDict):
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


@_exact
class ChoiceResult(TypedDict):
    """The choice for a prompt."""

    probabilities: Annotated[Vector, Field(description="Probability of each ending.")]
    best_index: Annotated[int, Field(description="Index of the most probable ending.")]
    truncated: bool


@_exact
class RankedText(TypedDict):
    """A text in the order of relevance; ``text`` is sent only with return_text."""

    index: Annotated[int, Field(description="Index of the text in the request.")]
    score: float
    text: NotRequired[str]


@_exact
class DocumentText(TypedDict):
    """A document of the request."""

    text: str


@_exact
class RankedDocument(TypedDict):
    """A document in the order of relevance; ``document`` is sent only with return_documents."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    relevance_score: float
    document: NotRequired[DocumentText]


@_exact
class RankingUsage(TypedDict):
    """Tokens of the request's texts."""

    total_tokens: int


@_exact
class Ranking(TypedDict):
    """Response of POST /v1/rerank, as in Cohere's and Jina's API."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: RankingUsage


@_exact
class Occurrence(TypedDict):
    """An occurrence of a word in a text."""

    text_index: int
    start: Annotated[int, Field(description="Index of the first character.")]
    end: Annotated[int, Field(description="Index after the last character.")]


@_exact
class LayerDistances(TypedDict):
    """Cosine distances of the vectors of all occurrences in a layer."""

    layer: int
    distances: Matrix


@_exact
class WordDistances(TypedDict):
    """Response of POST /word_distances."""

    word: str
    occurrences: list[Occurrence]
    layers: list[LayerDistances]


@_exact
class AttentionMap(TypedDict):
    """Attention probabilities of a head; rows are query tokens."""

    layer: int
    head: int
    probabilities: Matrix


@_exact
class AttentionResult(TypedDict):
    """Response of POST /attention."""

    tokens: list[str]
    segments: list[int]
    num_removed_tokens: int
    maps: list[AttentionMap]


@_exact
class AttributionsResult(TypedDict):
    """Response of POST /attributions."""

    label: Annotated[str | None, Field(description="Null for a regression model.")]
    score: Annotated[float, Field(description="Probability of the label, or the output.")]
    tokens: list[str]
    segments: list[int]
    attributions: Annotated[
        Vector, Field(description="Score minus the score if the token is replaced by [MASK].")
    ]
    truncated: bool


@_exact
class InferenceAnswer(TypedDict):
    """An answer, in the format of Hugging Face's inference API."""

    answer: str
    score: float
    start: int
    end: int


@_exact
class InferenceFilling(TypedDict):
    """A prediction for a [MASK], in the format of Hugging Face's inference API."""

    score: float
    token: int
    token_str: str
    sequence: str


@_exact
class InferenceEntity(TypedDict):
    """An entity, in the format of Hugging Face's inference API."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


#: Responses of POST /: a list of labels per text, an answer, predictions for one or several masks,
#: entities, similarities, or a vector per text.
InferenceResult = (
    list[list[LabelScore]]
    | InferenceAnswer
    | list[InferenceFilling]
    | list[list[InferenceFilling]]
    | list[InferenceEntity]
    | Similarities
)
FillResult = FilledText | list[FilledText]
PairResult = NextSentencePrediction | list[NextSentencePrediction]
ClassifyResult = Labels | Score | list[Labels | Score]
PredictResult = list[LabelScore] | list[list[LabelScore]]
TagResult = list[Span] | list[list[Span]]
AnswerResults = AnswerResult | list[AnswerResult]
ChooseResults = ChoiceResult | list[ChoiceResult]
