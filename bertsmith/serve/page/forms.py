"""Forms of the page, one per task, with their examples."""

from dataclasses import dataclass

from bertsmith.serve.page import answers
from bertsmith.serve.page.answers import Show


@dataclass(frozen=True)
class Field:
    """A text field of a form."""

    label: str
    lines: int = 1
    hint: str = ""


@dataclass(frozen=True)
class Form:
    """A tab with text fields.

    Attributes:
        ability: ability that a model needs.
        title: title of the tab.
        description: sentence above the fields.
        button: label of the button.
        fields: the text fields.
        examples: texts of all fields, one tuple per example.
        show: runs the task and returns HTML.
    """

    ability: str
    title: str
    description: str
    button: str
    fields: tuple[Field, ...]
    examples: tuple[tuple[str, ...], ...]
    show: Show


FORMS = (
    Form(
        "fill", "Fill in", "The model's predictions for each [MASK].", "Fill in",
        (Field("Text with [MASK]", 3),),
        (("The capital of France is [MASK].",),
         ("The [MASK] was too [MASK] to cross the river.",),
         ("나는 오늘 학교에 [MASK].",)),
        answers.fill,
    ),
    Form(
        "pair", "Next sentence", "The probability that the second text follows the first.",
        "Does B follow A?", (Field("Text A", 2), Field("Text B", 2)),
        (("The old man opened the door.", "He looked into the dark garden."),
         ("The old man opened the door.", "Penguins are birds that do not fly."),
         ("비가 많이 왔다.", "그래서 우산을 샀다.")),
        answers.pair,
    ),
    Form(
        "classify", "Classify", "The label of a text or a pair of texts.", "Classify",
        (Field("Text", 3), Field("Second text", 2, "for models of pairs, otherwise empty")),
        (("The film is a quiet joy from its first minute to its last.", ""),
         ("She the book gave to him yesterday quickly of.", ""),
         ("이 영화 정말 재미있어요.", "")),
        answers.classify,
    ),
    Form(
        "tag", "Entities", "The named entities in a text, or a tag for each word.", "Find them",
        (Field("Text", 3),),
        (("Angela Merkel visited Siemens in Munich before she flew to Paris.",),
         ("The United Nations met in Geneva on Monday, said John Smith of Reuters.",),
         ("김연아는 서울에서 삼성 직원을 만났다.",)),
        answers.tag,
    ),
    Form(
        "answer", "Answer", "The answer to a question, extracted from a context.", "Answer",
        (Field("Question"), Field("Context", 5)),
        (("Where did the smith work?",
          ("The smith worked in a forge at the edge of the village. He had learnt his trade in "
          "Prague, and his hammer was older than he was.")),
         ("Who wrote the book?",
          ("The book was printed in 1605. Miguel de Cervantes wrote it, and it was read all over "
          "Europe within a few years.")),
         ("언제 태어났습니까?", "세종대왕은 1397년에 한양에서 태어났다.")),
        answers.answer,
    ),
    Form(
        "choose", "Choose", "The most plausible of several endings.", "Choose",
        (Field("Beginning", 2), Field("Endings", 4, "one per line, two or more")),
        (("He put the cup under the tap and",
          "filled it with water.\nread it aloud.\nmarried it.\nflew to the moon."),
         ("The children ran outside because",
          "it had begun to snow.\nthe soup was blue.\nnumbers are even."),
         ("배가 고파서", "밥을 먹었다.\n하늘이 되었다.")),
        answers.choose,
    ),
)  # fmt: skip
WORD_EXAMPLES = (
    ("bank",
     ("He sat on the bank of the river and fished.\n"
     "The bank raised its interest rates again.\n"
     "They swam to the other bank before dark.\n"
     "She opened an account at a bank in the city.\n"
     "Reeds grew along the muddy bank.\n"
     "The bank refused to lend him the money.")),
    ("light",
     ("The light in the kitchen was still on.\n"
     "Her bag was light enough to carry.\n"
     "A light meal is best before running.\n"
     "The light of the moon fell on the snow.")),
    ("배", "배가 고파서 밥을 먹었다.\n항구에 큰 배가 들어왔다.\n시장에서 배를 두 개 샀다."),
)  # fmt: skip
ATTENTION_EXAMPLES = (
    ("The cat sat on the mat because it was tired.", ""),
    ("The old man opened the door.", "He looked into the dark garden."),
    ("고양이가 피곤해서 소파 위에 앉았다.", ""),
)
