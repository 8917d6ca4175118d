"""Types of the fields of request bodies, and the base class of the bodies.

The number of validation errors is limited, even if an invalid body is very large.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from bertsmith.compatibility import upgrade_request
from bertsmith.serve.limits import check_limit

Item = TypeVar("Item")
#: Tags of union branches. Pydantic adds them to error locations, although they are not fields.
BRANCH_TAGS: Final = frozenset({"<one>", "<list>", "<object>", "<ids>", "<id lists>"})


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


def select_branch(value: Any) -> str:
    """Return the tag of the union branch that validates a value."""
    return "<list>" if isinstance(value, list) else "<one>"


def select_document_branch(value: Any) -> str:
    """Return the tag of the union branch for a text or an object."""
    return "<object>" if isinstance(value, dict) else "<one>"


def select_inference_branch(value: Any) -> str:
    """Return the tag of the union branch for a text, a list or an object."""
    return "<list>" if isinstance(value, list) else select_document_branch(value)


def select_pair_branch(value: Any) -> str:
    """Return the tag of the union branch for [A, B] or [[A, B], ...]."""
    is_list = isinstance(value, list) and (not value or isinstance(value[0], list))
    return "<list>" if is_list else "<one>"


def select_input_branch(value: Any) -> str:
    """Return the tag of the union branch for texts or token ids."""
    if not isinstance(value, list) or not value:
        return select_branch(value)
    if isinstance(value[0], list):
        return "<id lists>"
    return "<ids>" if type(value[0]) is int else "<list>"


def select_batch_branch(value: Any) -> str:
    """Return the tag of the union branch for a text, a list of texts, or several such lists."""
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return "<id lists>" if is_nested else select_branch(value)


def select_ids_branch(value: Any) -> str:
    """Return the tag of the union branch for the ids of one text or of several texts."""
    is_nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return "<id lists>" if is_nested else "<ids>"


def _reject_boolean(value: Any) -> Any:
    """Return a value; true and false, which Pydantic converts to integers, are errors."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


#: Makes an integer field reject booleans. It follows the limits of the field, which otherwise would
#: not be part of the JSON schema.
NOT_BOOLEAN: Final = BeforeValidator(_reject_boolean)
#: A list of at least one item, and at most as many as a request may have texts.
Items = Annotated[list[Item], FailFastList("texts"), Field(min_length=1)]
#: An item or a list of items.
OneOrSeveral = Annotated[
    Annotated[Item, Tag("<one>")] | Annotated[Items[Item], Tag("<list>")],
    Discriminator(select_branch),
]
Texts = Items[str]
TokenIds = Annotated[list[Annotated[int, Field(strict=True)]], FailFastList(), Field(min_length=1)]
#: A text, texts, or the token ids of one or several texts.
TextsOrTokenIds = Annotated[
    Annotated[str, Tag("<one>")]
    | Annotated[Texts, Tag("<list>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Items[TokenIds], Tag("<id lists>")],
    Discriminator(select_input_branch),
    Field(description="A text, texts, or token ids of the model's tokenizer from [CLS] to [SEP]."),
]
#: [A] or [A, B].
OneOrTwoTexts = Annotated[list[str], FailFastList(), Field(min_length=1, max_length=2)]
TextPair = tuple[str, str]
#: A text, or a pair [A, B].
TextOrPair = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[TextPair, Tag("<list>")], Discriminator(select_branch)
]
#: Weight of a layer. Larger values would overflow float32 in the weighted sum.
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Truncate = Annotated[
    bool, Field(description="Truncate texts that are too long, instead of rejecting them.")
]
PromptName = Annotated[
    str | None,
    Field(
        description="Name of a prompt of a sentence-transformers model, which is added to each "
        "text; null: the default prompt of the model, if it has one."
    ),
]
#: text-embeddings-inference writes the first letter of directions in upper case.
_TO_LOWER_CASE = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
TruncationDirection = Annotated[
    Literal["right", "left"],
    _TO_LOWER_CASE,
    WithJsonSchema({"type": "string", "enum": ["right", "left", "Right", "Left"]}),
    Field(description="Side on which texts are truncated."),
]
#: Direction of endpoints that truncate the longer text of a pair at its end.
RightTruncation = Annotated[
    Literal["right"],
    _TO_LOWER_CASE,
    WithJsonSchema({"type": "string", "enum": ["right", "Right"]}),
    Field(description="Side on which texts are truncated; only the right side is supported."),
]
#: Elements of shortened vectors.
Dimensions = Annotated[
    int | None,
    Field(ge=1, description="Elements of each vector; null: all. Shortened vectors keep length 1."),
    NOT_BOOLEAN,
]
ModelName = Annotated[
    str | None, Field(description="Model name; by default the first model that supports this task.")
]


#: JSON schema of the field that Hugging Face's clients send, although it has no effect.
_EMPTY_PARAMETERS: Final[dict[str, Any]] = {
    "anyOf": [{"type": "object", "maxProperties": 0}, {"type": "null"}],
    "default": {},
    "description": "Must be empty; accepted because Hugging Face's clients send it.",
}


def _is_nullable(field: FieldInfo) -> bool:
    """Return whether null is a value of the field; for other fields, it means the default."""
    return field.is_required() or type(None) in get_args(field.annotation)


def _make_nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a field that may also be null."""
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    annotations: dict[str, Any] = {
        key: schema[key] for key in ("title", "description", "default") if key in schema
    }
    content = {key: value for key, value in schema.items() if key not in annotations}
    return {"anyOf": [content, {"type": "null"}], **annotations}


def _is_empty_parameters(name: str, value: Any) -> bool:
    """Return whether a field is the empty "parameters" of Hugging Face's clients."""
    return name == "parameters" and (value is None or value == {})


class StrictModel(BaseModel):
    """Base model that rejects unknown keys, and reports only the first one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the JSON schema, in which optional fields and empty parameters may be null."""
        json_schema = handler(schema)
        model_schema = handler.resolve_ref_schema(json_schema)
        properties = model_schema["properties"]
        for name in properties.keys() - set(model_schema.get("required", ())):
            properties[name] = _make_nullable(properties[name])
        properties.setdefault("parameters", _EMPTY_PARAMETERS)
        return json_schema

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
                if name not in cls.model_fields and not _is_empty_parameters(name, value[name])
            ),
            None,
        )
        if unknown is not None:
            fields[unknown] = value[unknown]
        return fields


class BaseBody(StrictModel):
    """Fields of all request bodies."""

    model: ModelName = None
