"""Request bodies of the endpoints.

The number of validation errors is limited, even if an invalid body is very large.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from bertsmith.compatibility import upgrade_request
from bertsmith.serve.limits import MAX_TOP, check_limit
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

#: Maximum number of layers, and of layer weights, per request; far more than any model has.
MAX_LAYERS: Final = 1024
#: Tags of union branches. Pydantic adds them to error locations, although they are not fields.
BRANCH_TAGS: Final = frozenset({"<one>", "<list>", "<ids>", "<id lists>"})


@dataclass(frozen=True)
class FailFastList:
    """List annotation: validation stops at the first invalid item.

    Attributes:
        limit_name: key of the list's maximum length in the validation context, None for no maximum.
            The length is checked before the items.
    """

    limit_name: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's core schema of the list with these checks."""
        schema: Any = handler(source)
        schema["fail_fast"] = True
        if self.limit_name is None:
            return schema  # type: ignore[no-any-return]
        return core_schema.with_info_before_validator_function(self._check_length, schema)

    def _check_length(self, value: Any, info: ValidationInfo) -> Any:
        """Return the value; raise RequestTooLargeError if it is a list that is too long."""
        if self.limit_name is not None and isinstance(value, list) and info.context:
            check_limit(self.limit_name, len(value), info.context[self.limit_name])
        return value


def _select_branch(value: Any) -> str:
    """Return the tag of the union branch that validates a value."""
    return "<list>" if isinstance(value, list) else "<one>"


def _select_pair_branch(value: Any) -> str:
    """Return the tag of the union branch for [A, B] or [[A, B], ...]."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], list))
    return "<list>" if is_list else "<one>"


def _select_input_branch(value: Any) -> str:
    """Return the tag of the union branch for texts or token ids."""
    if not isinstance(value, list) or not value:
        return _select_branch(value)
    if isinstance(value[0], list):
        return "<id lists>"
    return "<ids>" if type(value[0]) is int else "<list>"


def _select_ids_branch(value: Any) -> str:
    """Return the tag of the union branch for the ids of one text or of several texts."""
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return "<id lists>" if is_nested else "<ids>"


Texts = Annotated[list[str], FailFastList("texts"), Field(min_length=1)]
#: A text or a list of texts.
Inputs = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[Texts, Tag("<list>")], Discriminator(_select_branch)
]
TokenIds = Annotated[list[Annotated[int, Field(strict=True)]], FailFastList(), Field(min_length=1)]
#: [A] or [A, B].
TextOrPair = Annotated[list[str], FailFastList(), Field(min_length=1, max_length=2)]
TextPair = tuple[str, str]
#: Weight of a layer. Larger values would overflow float32 in the weighted sum.
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
TruncationDirection = Annotated[
    Literal["right", "left"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    Field(description="Side on which texts are truncated."),
]
#: Elements of shortened vectors.
Dimensions = Annotated[
    int | None,
    Field(ge=1, description="Elements of each vector; null: all. Shortened vectors keep length 1."),
]
ModelName = Annotated[
    str | None, Field(description="Model name; by default the first model that supports this task.")
]


def _is_nullable(field: FieldInfo) -> bool:
    """Return whether null is not the same as leaving the field out."""
    return field.is_required() or type(None) in get_args(field.annotation)


class StrictModel(BaseModel):
    """Base model that rejects unknown keys, and reports only the first one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _upgrade_and_keep_one_unknown_key(cls, value: Any) -> Any:
        """Rename the fields of older versions, and remove all unknown keys but the first.

        Hugging Face's clients send ``"parameters": {}`` and null for optional fields, which is
        the same as leaving them out.
        """
        # Pydantic would report every unknown key, and a body can have hundreds of thousands.
        if not isinstance(value, dict):
            return value
        value = upgrade_request(value, cls.model_fields)
        fields = {
            name: value[name]
            for name, field in cls.model_fields.items()
            if name in value and (value[name] is not None or _is_nullable(field))
        }
        unknown = next(
            (
                name
                for name in value
                if name not in cls.model_fields and not (name == "parameters" and not value[name])
            ),
            None,
        )
        if unknown is not None:
            fields[unknown] = value[unknown]
        return fields


class BaseBody(StrictModel):
    """Fields of all request bodies."""

    model: ModelName = None


class VectorsBody(BaseBody):
    """Body of POST /embed_all, and fields of other bodies; see ``VectorSettings``."""

    inputs: Inputs
    layer: (
        Annotated[
            Annotated[int, Tag("<one>")]
            | Annotated[
                list[int],
                FailFastList(),
                Field(min_length=1, max_length=MAX_LAYERS),
                Tag("<list>"),
            ],
            Discriminator(_select_branch),
        ]
        | None
    ) = None
    combine: Literal["concat", "mean", "weighted"] = "concat"
    weights: Annotated[list[Weight], FailFastList(), Field(max_length=MAX_LAYERS)] = []
    include_special_tokens: bool = True
    truncate: Annotated[
        bool, Field(description="Truncate texts that are too long, instead of rejecting them.")
    ] = True
    prompt_name: Annotated[
        Literal["default"] | None,
        Field(
            description='Null or "default": the default prompt of a sentence-transformers model.'
        ),
    ] = None

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
    truncation_direction: TruncationDirection = "right"
    dimensions: Dimensions = None


class OpenAiBody(BaseModel):
    """Body of POST /v1/embeddings, as OpenAI's clients send it; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[Texts, Tag("<list>")]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], FailFastList("texts"), Field(min_length=1), Tag("<id lists>")],
        Discriminator(_select_input_branch),
        Field(
            description="A text, texts, or token ids of the model's tokenizer from [CLS] to [SEP]."
        ),
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions = None
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


class Document(BaseModel):
    """A document of POST /v1/rerank with other fields, which are ignored."""

    text: str


class CohereRerankBody(BaseModel):
    """Body of POST /v1/rerank and /v2/rerank, as clients of Cohere and Jina send it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    query: str
    documents: Annotated[list[str | Document], FailFastList("texts"), Field(min_length=1)]
    model: str | None = None
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None


class SimilarityInputs(StrictModel):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: Texts


class SimilarityBody(BaseBody):
    """Body of POST /similarity: a sentence and others, or a list of texts."""

    inputs: Annotated[
        Annotated[SimilarityInputs, Tag("<one>")] | Annotated[Texts, Tag("<list>")],
        Discriminator(_select_branch),
    ]


class WordDistancesBody(BaseBody):
    """Body of POST /word_distances."""

    inputs: Texts
    word: Annotated[str, Field(description="A word that every text contains.")]
    layer: Annotated[
        int | None, Field(description="0: the embeddings; -1: the last layer; null: all layers.")
    ] = None


class AttentionBody(BaseBody):
    """Body of POST /attention: a text, or a pair [A, B]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")] | Annotated[TextPair, Tag("<list>")],
        Discriminator(_select_branch),
    ]
    layer: Annotated[
        int | None, Field(ge=1, description="Layer, counted from 1; null: all layers.")
    ] = None
    head: Annotated[
        int | None, Field(ge=1, description="Head, counted from 1; null: all heads.")
    ] = None
    max_cells: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum rows and columns of each matrix; larger ones are max-pooled.",
        ),
    ] = None


class TokenizeBody(BaseBody):
    """Body of POST /tokenize."""

    inputs: Inputs
    add_special_tokens: bool = True


class FillBody(BaseBody):
    """Body of POST /fill."""

    inputs: Inputs
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5


class PairBody(BaseBody):
    """Body of POST /pair: a pair [A, B], or a list of pairs."""

    inputs: Annotated[
        Annotated[TextPair, Tag("<one>")]
        | Annotated[list[TextPair], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_select_pair_branch),
    ]


class ClassifyBody(BaseBody):
    """Body of POST /classify: a text, or a list of texts and pairs [A, B]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[
            list[
                Annotated[
                    Annotated[str, Tag("<one>")] | Annotated[TextPair, Tag("<list>")],
                    Discriminator(_select_branch),
                ]
            ],
            FailFastList("texts"),
            Field(min_length=1),
            Tag("<list>"),
        ],
        Discriminator(_select_branch),
    ]


class PredictBody(BaseBody):
    """Body of POST /predict: a text, a pair [A, B], or a batch [[A], [A, B], ...]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[TextOrPair, Tag("<list>")]
        | Annotated[
            list[TextOrPair], FailFastList("texts"), Field(min_length=1), Tag("<id lists>")
        ],
        Discriminator(_select_input_branch),
    ]
    raw_scores: Annotated[
        bool, Field(description="Return the output of a model with one output, without a sigmoid.")
    ] = False
    truncate: Annotated[
        bool, Field(description="Truncate texts that are too long, instead of rejecting them.")
    ] = True


class DecodeBody(BaseBody):
    """Body of POST /decode: the token ids of a text, or of several texts."""

    ids: Annotated[
        Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], FailFastList("texts"), Field(min_length=1), Tag("<id lists>")],
        Discriminator(_select_ids_branch),
    ]
    skip_special_tokens: bool = True


class InferenceBody(BaseModel):
    """Body of POST /, as Hugging Face's InferenceClient sends it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    inputs: Annotated[
        str | Annotated[list[str], FailFastList()] | dict[str, Any],
        Field(description="A text, texts, or an object."),
    ]
    model: ModelName = None
    parameters: Annotated[
        dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)
    ] = {}


class TagBody(BaseBody):
    """Body of POST /tag."""

    inputs: Inputs


class QuestionInput(StrictModel):
    """A question and its context."""

    question: str
    context: str


class AnswerBody(BaseBody):
    """Body of POST /answer."""

    inputs: Annotated[
        Annotated[QuestionInput, Tag("<one>")]
        | Annotated[list[QuestionInput], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_select_branch),
    ]


class PromptInput(StrictModel):
    """A prompt and its endings."""

    prompt: str
    endings: Annotated[list[str], FailFastList("texts"), Field(min_length=2)]


class ChooseBody(BaseBody):
    """Body of POST /choose."""

    inputs: Annotated[
        Annotated[PromptInput, Tag("<one>")]
        | Annotated[list[PromptInput], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_select_branch),
    ]
