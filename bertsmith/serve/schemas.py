"""Request bodies of the endpoints."""

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from bertsmith.serve.body_fields import (
    NOT_BOOLEAN,
    BaseBody,
    Dimensions,
    FailFastList,
    Items,
    ModelName,
    OneOrSeveral,
    OneOrTwoTexts,
    PromptName,
    RightTruncation,
    StrictModel,
    TextOrPair,
    TextPair,
    Texts,
    TextsOrTokenIds,
    TokenIds,
    Truncate,
    TruncationDirection,
    Weight,
    select_batch_branch,
    select_branch,
    select_document_branch,
    select_ids_branch,
    select_inference_branch,
    select_pair_branch,
)
from bertsmith.serve.limits import MAX_TOP
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

#: Maximum number of layers, and of layer weights, per request; far more than any model has.
MAX_LAYERS: Final = 1024


class VectorsBody(BaseBody):
    """Body of POST /embed_all, and fields of other bodies; see ``VectorSettings``."""

    inputs: TextsOrTokenIds
    layer: (
        Annotated[
            Annotated[int, NOT_BOOLEAN, Tag("<one>")]
            | Annotated[
                list[Annotated[int, NOT_BOOLEAN]],
                FailFastList(),
                Field(min_length=1, max_length=MAX_LAYERS),
                Tag("<list>"),
            ],
            Discriminator(select_branch),
        ]
        | None
    ) = None
    combine: Literal["concat", "mean", "weighted"] = "concat"
    weights: Annotated[list[Weight], FailFastList(), Field(max_length=MAX_LAYERS)] = Field(
        default_factory=list
    )
    include_special_tokens: bool = True
    truncate: Truncate = True
    truncation_direction: TruncationDirection = "right"
    prompt_name: PromptName = None

    def to_vector_settings(self, **overrides: Any) -> VectorSettings:
        """Return the body's settings.

        Raises:
            SettingsError: the settings contradict each other.
        """
        return build_vector_settings(
            self.layer,
            combine=self.combine,
            weights=self.weights,
            include_special_tokens=self.include_special_tokens,
            **overrides,
        )


class EmbedBody(VectorsBody):
    """Body of POST /embed."""

    pooling: str | None = None
    normalize: bool | None = True
    dimensions: Dimensions = None


class EmbedSparseBody(BaseBody):
    """Body of POST /embed_sparse."""

    inputs: TextsOrTokenIds
    truncate: Truncate = True
    truncation_direction: TruncationDirection = "right"
    prompt_name: PromptName = None


class OpenAiBody(BaseModel):
    """Body of POST /v1/embeddings, as OpenAI's clients send it; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: TextsOrTokenIds
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions = None
    prompt_name: PromptName = None
    user: str | None = None


class RerankBody(BaseBody):
    """Body of POST /rerank, as clients of text-embeddings-inference send it."""

    query: str
    texts: Texts
    raw_scores: Annotated[
        bool, Field(description="Return the outputs of the model, without a sigmoid.")
    ] = False
    return_text: bool = False
    truncate: Annotated[
        bool, Field(description="Truncate pairs that are too long, instead of rejecting them.")
    ] = True
    truncation_direction: RightTruncation = "right"


class Document(BaseModel):
    """A document of POST /v1/rerank with other fields, which are ignored."""

    text: str


class CohereRerankBody(BaseModel):
    """Body of POST /v1/rerank and /v2/rerank, as clients of Cohere and Jina send it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    query: str
    documents: Items[
        Annotated[
            Annotated[str, Tag("<one>")] | Annotated[Document, Tag("<object>")],
            Discriminator(select_document_branch),
        ]
    ]
    model: str | None = None
    top_n: Annotated[int | None, Field(ge=1), NOT_BOOLEAN] = None
    return_documents: bool | None = None


class SimilarityInputs(StrictModel):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: Texts


class SimilarityParameters(StrictModel):
    """Parameters of POST /similarity, as clients of text-embeddings-inference send them."""

    truncate: Truncate = True
    truncation_direction: TruncationDirection = "right"
    prompt_name: PromptName = None


class SimilarityBody(BaseBody):
    """Body of POST /similarity: a sentence and others, or a list of texts."""

    inputs: Annotated[
        Annotated[SimilarityInputs, Tag("<one>")] | Annotated[Texts, Tag("<list>")],
        Discriminator(select_branch),
    ]
    parameters: SimilarityParameters = SimilarityParameters()


class WordDistancesBody(BaseBody):
    """Body of POST /word_distances."""

    inputs: Texts
    # Finding the word takes a time proportional to its length times that of the texts.
    word: Annotated[str, Field(max_length=100, description="A word that every text contains.")]
    layer: Annotated[
        int | None,
        Field(description="0: the embeddings; -1: the last layer; null: all layers."),
        NOT_BOOLEAN,
    ] = None


class AttentionBody(BaseBody):
    """Body of POST /attention: a text, or a pair [A, B]."""

    inputs: TextOrPair
    layer: Annotated[
        int | None,
        Field(ge=1, description="Layer, counted from 1; null: all layers."),
        NOT_BOOLEAN,
    ] = None
    head: Annotated[
        int | None,
        Field(ge=1, description="Head, counted from 1; null: all heads."),
        NOT_BOOLEAN,
    ] = None
    max_cells: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum rows and columns of each matrix; larger ones are max-pooled.",
        ),
        NOT_BOOLEAN,
    ] = None


class AttributionsBody(BaseBody):
    """Body of POST /attributions: a text, or a pair [A, B]."""

    inputs: TextOrPair
    label: Annotated[
        str | None, Field(description="Label to explain; null: the most probable one.")
    ] = None


class TokenizeBody(BaseBody):
    """Body of POST /tokenize."""

    inputs: OneOrSeveral[str]
    add_special_tokens: bool = True
    prompt_name: Annotated[
        str | None,
        Field(
            description="Name of a prompt of a sentence-transformers model, which is added to each "
            "text and included in the offsets; null: no prompt."
        ),
    ] = None


class FillBody(BaseBody):
    """Body of POST /fill."""

    inputs: OneOrSeveral[str]
    top: Annotated[int, Field(ge=1, le=MAX_TOP), NOT_BOOLEAN] = 5


class PairBody(BaseBody):
    """Body of POST /pair: a pair [A, B], or a list of pairs."""

    inputs: Annotated[
        Annotated[TextPair, Tag("<one>")] | Annotated[Items[TextPair], Tag("<list>")],
        Discriminator(select_pair_branch),
    ]


class ClassifyBody(BaseBody):
    """Body of POST /classify: a text, or a list of texts and pairs [A, B]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")] | Annotated[Items[TextOrPair], Tag("<list>")],
        Discriminator(select_branch),
    ]


class PredictBody(BaseBody):
    """Body of POST /predict: a text, a pair [A, B], or a batch [[A], [A, B], ...]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[OneOrTwoTexts, Tag("<list>")]
        | Annotated[Items[OneOrTwoTexts], Tag("<id lists>")],
        Discriminator(select_batch_branch),
    ]
    raw_scores: Annotated[
        bool, Field(description="Return the output of a model with one output, without a sigmoid.")
    ] = False
    truncate: Truncate = True
    truncation_direction: RightTruncation = "right"


class DecodeBody(BaseBody):
    """Body of POST /decode: the token ids of a text, or of several texts."""

    ids: Annotated[
        Annotated[TokenIds, Tag("<ids>")] | Annotated[Items[TokenIds], Tag("<id lists>")],
        Discriminator(select_ids_branch),
    ]
    skip_special_tokens: bool = True


class InferenceBody(BaseModel):
    """Body of POST /, as Hugging Face's InferenceClient sends it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    inputs: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[list[str], FailFastList(), Tag("<list>")]
        | Annotated[dict[str, Any], Tag("<object>")],
        Discriminator(select_inference_branch),
        Field(description="A text, texts, or an object."),
    ]
    model: ModelName = None
    parameters: Annotated[
        dict[str, Any],
        BeforeValidator(lambda value: {} if value is None else value),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
        Field(description="Parameters of the task, such as top_k."),
    ] = {}


class TagBody(BaseBody):
    """Body of POST /tag."""

    inputs: OneOrSeveral[str]


class QuestionInput(StrictModel):
    """A question and its context."""

    question: str
    context: str


class AnswerBody(BaseBody):
    """Body of POST /answer."""

    inputs: OneOrSeveral[QuestionInput]


class PromptInput(StrictModel):
    """A prompt and its endings."""

    prompt: str
    endings: Annotated[list[str], FailFastList("texts"), Field(min_length=2)]


class ChooseBody(BaseBody):
    """Body of POST /choose."""

    inputs: OneOrSeveral[PromptInput]
