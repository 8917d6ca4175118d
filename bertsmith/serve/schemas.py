"""Request bodies of the endpoints.

The number of validation errors is limited, even if an invalid body is very large.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from bertsmith.compatibility import upgrade_request
from bertsmith.serve.limits import MAX_TOP, check_limit
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

#: Maximum number of layers, and of layer weights, per request; far more than any model has.
MAX_LAYERS: Final = 1024
#: Tags of union branches. Pydantic adds them to error locations, although they are not fields.
BRANCH_TAGS: Final = frozenset({"<one>", "<list>"})


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


Texts = Annotated[list[str], FailFastList("texts"), Field(min_length=1)]
#: A text or a list of texts.
Inputs = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[Texts, Tag("<list>")], Discriminator(_select_branch)
]
TextPair = tuple[str, str]
#: Weight of a layer. Larger values would overflow float32 in the weighted sum.
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
ModelName = Annotated[
    str | None, Field(description="Model name; by default the first model that supports this task.")
]


class StrictModel(BaseModel):
    """Base model that rejects unknown keys, and reports only the first one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _upgrade_and_keep_one_unknown_key(cls, value: Any) -> Any:
        """Rename the fields of older versions, and remove all unknown keys but the first."""
        # Pydantic would report every unknown key, and a body can have hundreds of thousands.
        if not isinstance(value, dict):
            return value
        value = upgrade_request(value, cls.model_fields)
        fields = {name: value[name] for name in cls.model_fields if name in value}
        if len(fields) < len(value):
            unknown = next(name for name in value if name not in cls.model_fields)
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


class OpenAiBody(BaseModel):
    """Body of POST /v1/embeddings, as OpenAI's clients send it; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _refuse_token_ids(cls, value: Any) -> Any:
        """Raise an error with advice for lists of token ids, which OpenAI's API accepts."""
        if isinstance(value, list) and (not value or isinstance(value[0], int | list)):
            raise PydanticCustomError(
                "text_expected",
                "expected a text or a non-empty list of texts; token ids of another tokenizer are "
                "not accepted (LangChain: set check_embedding_ctx_length=False)",
            )
        return value


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
