"""Request body of each endpoint; an invalid body yields a few errors, whatever its size."""

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

from bertsmith.serve.limits import MAX_TOP, check_limit
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

#: Layers, and weights of layers, per request; no model has nearly as many.
MAX_LAYERS: Final = 1024
#: Tags of the branches of a union; they are not part of a field's name in error messages.
TAGS: Final = frozenset({"<one>", "<list>"})


@dataclass(frozen=True)
class FailFastList:
    """List annotation: validation stops at the first invalid item.

    Attributes:
        what: name of the items, for a list that may have ``context[what]`` items at most. The
            length is checked before the items. None: the length is not checked here.
    """

    what: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's schema of the list with these checks."""
        schema: Any = handler(source)
        schema["fail_fast"] = True
        if self.what is None:
            return schema  # type: ignore[no-any-return]
        return core_schema.with_info_before_validator_function(self._check_length, schema)

    def _check_length(self, value: Any, info: ValidationInfo) -> Any:
        if self.what is not None and isinstance(value, list) and info.context:
            check_limit(self.what, len(value), info.context[self.what])
        return value


def _branch(value: Any) -> str:
    """Return the tag of the union branch that reports errors about a value."""
    return "<list>" if isinstance(value, list) else "<one>"


def _pair_branch(value: Any) -> str:
    """Return the tag for [A, B] or [[A, B], ...]."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], list))
    return "<list>" if is_list else "<one>"


Texts = Annotated[list[str], FailFastList("texts"), Field(min_length=1)]
#: One text or several.
Inputs = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[Texts, Tag("<list>")], Discriminator(_branch)
]
TextPair = tuple[str, str]
#: Of a layer. Larger ones would make sums that float32 cannot hold.
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Name = Annotated[str | None, Field(description="Which model; the first that can, if not given.")]


class StrictModel(BaseModel):
    """Model that rejects unknown keys and reports the first one only."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, value: Any) -> Any:
        # pydantic would report each of the hundreds of thousands of keys that a body can have.
        if not isinstance(value, dict):
            return value
        fields = {name: value[name] for name in cls.model_fields if name in value}
        if len(fields) < len(value):
            unknown = next(name for name in value if name not in cls.model_fields)
            fields[unknown] = value[unknown]
        return fields


class Body(StrictModel):
    """What all bodies have: the model's name."""

    model: Name = None


class VectorsBody(Body):
    """How vectors are made; see ``VectorSettings``."""

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
            Discriminator(_branch),
        ]
        | None
    ) = None
    combine: Literal["concat", "mean", "weighted"] = "concat"
    weights: Annotated[list[Weight], FailFastList(), Field(max_length=MAX_LAYERS)] = []
    special: bool = True
    truncate: Annotated[
        bool, Field(description="Cut a text that is too long, rather than refuse it.")
    ] = True

    def vector_settings(self, **more: Any) -> VectorSettings:
        """Return the settings that are asked for. Raises SettingsError."""
        return build_vector_settings(
            self.layer, combine=self.combine, weights=self.weights, special=self.special, **more
        )


class EmbedBody(VectorsBody):
    """POST /embed."""

    pooling: str | None = None
    normalize: bool | None = True


class OpenAiBody(BaseModel):
    """POST /v1/embeddings, as OpenAI's clients send it. Other fields of theirs are not read."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    input: Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _refuse_token_ids(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or isinstance(value[0], int | list)):
            raise PydanticCustomError(
                "text_expected",
                "expected a text or a list of texts, at least one; ids of another tokenizer mean "
                "nothing to this model (LangChain: check_embedding_ctx_length=False)",
            )
        return value


class Compared(StrictModel):
    """One sentence, and those it is compared with."""

    source_sentence: str
    sentences: Texts


class SimilarityBody(Body):
    """POST /similarity."""

    inputs: Compared


class TokenizeBody(Body):
    """POST /tokenize."""

    inputs: Inputs
    add_special_tokens: bool = True


class FillBody(Body):
    """POST /fill."""

    inputs: Inputs
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5


class PairBody(Body):
    """POST /pair: [A, B], or several of them."""

    inputs: Annotated[
        Annotated[TextPair, Tag("<one>")]
        | Annotated[list[TextPair], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_pair_branch),
    ]


class ClassifyBody(Body):
    """POST /classify: a text or several; each may be a pair [A, B]."""

    inputs: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[
            list[
                Annotated[
                    Annotated[str, Tag("<one>")] | Annotated[TextPair, Tag("<list>")],
                    Discriminator(_branch),
                ]
            ],
            FailFastList("texts"),
            Field(min_length=1),
            Tag("<list>"),
        ],
        Discriminator(_branch),
    ]


class TagBody(Body):
    """POST /tag."""

    inputs: Inputs


class Asked(StrictModel):
    """A question and its context."""

    question: str
    context: str


class AnswerBody(Body):
    """POST /answer."""

    inputs: Annotated[
        Annotated[Asked, Tag("<one>")]
        | Annotated[list[Asked], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_branch),
    ]


class Prompt(StrictModel):
    """A prompt and its endings."""

    prompt: str
    endings: Annotated[list[str], FailFastList("texts"), Field(min_length=2)]


class ChooseBody(Body):
    """POST /choose."""

    inputs: Annotated[
        Annotated[Prompt, Tag("<one>")]
        | Annotated[list[Prompt], FailFastList("texts"), Field(min_length=1), Tag("<list>")],
        Discriminator(_branch),
    ]
