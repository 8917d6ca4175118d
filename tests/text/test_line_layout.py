"""Detecting the layout of text, joining wrapped lines, and splitting sentences."""

import pytest

from bertsmith.text import line_layout
from bertsmith.text.sentences import split_sentences

WRAPPED = [
    "The rain had only ceased with the gray streaks of morning at Blazing",
    "Star, and the settlement awoke to a moral sense of cleanliness, and the",
    "finding of forgotten knives, tin cups, and smaller camp utensils, where",
    "the heavy showers had washed away the debris.",
]
VERSE = [
    "Tyger Tyger, burning bright,",
    "In the forests of the night;",
    "What immortal hand or eye,",
]
#: Korean lines of about 60 columns, which have fewer than 45 characters.
WRAPPED_KOREAN = [
    "그날 아침 비는 동이 틀 무렵에야 그쳤고 마을은 젖은 지붕들 사이로",
    "천천히 깨어났다. 잊고 있던 칼과 양철 컵과 살림살이들이 흙탕물",
    "속에서 하나둘 모습을 드러냈는데 무거운 소나기가 집 앞의 쓰레기를",
    "모두 쓸어 가 버린 뒤였기 때문이다.",
]
WRAPPED_JAPANESE = [
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつ",
    "かぬ。何でも薄暗いじめじめした所でニャーニャー泣いていた事だ",
    "けは記憶している。吾輩はここで始めて人間というものを見た。",
]
#: Titles without punctuation, one per line.
KOREAN_TITLES = [
    "서울시 내년부터 시내버스 노선 전면 개편하고 배차 간격 줄이기로",
    "강원 산간에 올해 첫눈이 내려 도로 곳곳 통제",
    "국립박물관 야간 개장 시간 늘린다",
    "한국은행 기준금리 석 달째 동결하고 물가 상승에 대비하기로 결정",
    "남해안 굴 양식장 작년보다 수확이 절반 넘게 줄어 어민들 울상",
    "프로야구 개막전 관중 십만 명 넘어",
    "전국 대학 도서관 주민에게 문 연다는 소식에 이용자 크게 늘어나",
]
PRESPLIT = ["One sentence stands here.", "Another one follows it!", "", "A third one?"]
PARAGRAPHS = ["One sentence. Another one. A third.", "", "Two more. They end here.", "", "A last."]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (WRAPPED, True),
        (WRAPPED_KOREAN, True),
        (WRAPPED_JAPANESE, True),
        (VERSE, False),
        (KOREAN_TITLES, False),
        (PRESPLIT, False),
        ([*WRAPPED, "x" * 200], False),
        ([*WRAPPED_KOREAN, "글" * 61], False),
    ],
)
def test_wrapped_text_is_detected(lines: list[str], expected: bool) -> None:
    """Wrapped text has lines of about equal length that end in the middle of a sentence."""
    assert line_layout.is_wrapped(lines) is expected


@pytest.mark.parametrize(
    ("lines", "expected"), [(PRESPLIT, True), (PARAGRAPHS, False), (WRAPPED, False)]
)
def test_presplit_text_is_detected(lines: list[str], expected: bool) -> None:
    """Presplit text, the input format of the original BERT, has one sentence per line."""
    assert line_layout.is_presplit(lines) is expected


def test_wrapped_paragraphs_are_joined() -> None:
    """Each paragraph of wrapped text becomes one line; other text is not changed."""
    text = "\n".join([*WRAPPED, "", *WRAPPED])
    paragraph = " ".join(WRAPPED)
    assert line_layout.unwrap_paragraphs(text) == f"{paragraph}\n{paragraph}"
    assert line_layout.unwrap_paragraphs("\n".join(VERSE)) == "\n".join(VERSE)


def test_chinese_and_japanese_lines_are_joined_without_a_space() -> None:
    """Korean words are separated by spaces; there is no space between Japanese characters."""
    text = "\n".join([*WRAPPED_KOREAN, "", *WRAPPED_KOREAN])
    paragraph = " ".join(WRAPPED_KOREAN)
    assert line_layout.unwrap_paragraphs(text) == f"{paragraph}\n{paragraph}"
    text = "\n".join(WRAPPED_JAPANESE)
    assert line_layout.unwrap_paragraphs(text) == "".join(WRAPPED_JAPANESE)
    assert (
        line_layout.join_lines(["我用", "Python", "写程序。", "很好"]) == "我用 Python 写程序。很好"
    )
    assert line_layout.join_lines(["ア", "ｱ", "，", "한", "글", "𠮷"]) == "アｱ， 한 글 𠮷"


@pytest.mark.parametrize(
    "line",
    ["「行こう。」", "『行け！』", "（完。）", "【終。】", "《完。》", "〈完。〉"]
    + [f"끝{ending}" for ending in "．｡。！？"]
    + ["یہ ہے۔", "ነው።", "သည်။", "է։", "है॥"],
)
def test_sentence_ends_of_other_scripts(line: str) -> None:
    """Sentence ends of several scripts, and quotes and brackets after them, are recognized."""
    assert line_layout.ends_sentence(line)
    assert not line_layout.ends_sentence("끝」")


def test_korean_is_split_with_the_rules_of_english() -> None:
    """The library sentencex has no rules for Korean, as the guide says."""
    texts = [
        "나는 학교에 갔다. 그는 집에 왔다. J. K. 롤링은 Dr. Lee 를 만났다.",
        '그는 "안녕. 반가워." 라고 말했다. 2024. 3. 5. 발표했다. 제 No. 5 제품.',
        "(주)회사. 「끝. 처음.」 그래서 vs. 그것. a.m. 9시. 그리고… 그다음.",
    ]
    for text in texts:
        assert split_sentences(text, "ko") == split_sentences(text, "en")


def test_sentences_end_at_punctuation_and_line_breaks() -> None:
    """A heading is separate from the text below; abbreviations and numbers do not end sentences."""
    text = "The Cat\nMr. Smith has 1.5 cats, e.g. Tom.  They sleep!\n\n  Do they? "
    assert split_sentences(text) == [
        "The Cat",
        "Mr. Smith has 1.5 cats, e.g. Tom.",
        "They sleep!",
        "Do they?",
    ]
    assert split_sentences(" \n\n") == []


def test_presplit_text_is_split_only_at_line_breaks() -> None:
    """Presplit text is not split at a full stop inside a line."""
    assert split_sentences("One. Two.\n\n Three. \n", presplit=True) == ["One. Two.", "Three."]


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        ("ko", "나는 학교에 갔다. 그는 집에 왔다.", 2),
        ("zh", "今天天气很好。我们去吧!", 2),
        ("xx", "Alle kamen hin. Niemand ging weg.", 2),
    ],
)
def test_other_languages_are_split(language: str, text: str, count: int) -> None:
    """Korean, Chinese and a language that sentencex does not know are split."""
    assert len(split_sentences(text, language)) == count
