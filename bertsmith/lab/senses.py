"""Sentences with ambiguous English and Korean words, for the experiment ``context``."""

#: Maps language, word and sense to sentences that contain the word in this sense.
SENSES: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "en": {
        "bank": {
            "money": (
                "she opened an account at the bank to save her money",
                "the bank raised its interest rates last year",
                "he borrowed money from the bank to buy a house",
            ),
            "river": (
                "they sat on the bank of the river and watched the water",
                "trees grow along the bank of the stream",
                "the boat was tied to the bank near the bridge",
            ),
        },
        "spring": {
            "season": (
                "the flowers open in spring after a cold winter",
                "in the spring of that year he returned to the city",
                "birds come back every spring and summer",
            ),
            "water": (
                "clear water flows from a spring in the rock",
                "the village took its water from a hot spring",
                "the river begins at a spring in the mountains",
            ),
        },
        "light": {
            "to see by": (
                "the light of the sun came through the window",
                "turn on the light because the room is dark",
                "the speed of light was measured by the physicist",
            ),
            "not heavy": (
                "the box was light and easy to carry",
                "they used a light metal to make the aircraft",
                "he carried only a light bag on the journey",
            ),
        },
        "play": {
            "theatre": (
                "the play was first performed at the theatre in london",
                "he wrote a play in three acts about the king",
                "the actors in the play were very good",
            ),
            "game": (
                "the children play football in the park",
                "they play their home games at the stadium",
                "he began to play for the team at the age of ten",
            ),
        },
        "party": {
            "politics": (
                "the party won the election with a large majority",
                "he was a member of the communist party",
                "the leader of the party became prime minister",
            ),
            "feast": (
                "she danced with her friends at the birthday party",
                "they drank wine and ate cake at the party",
                "the guests left the party after midnight",
            ),
        },
    },
    "ko": {
        "배": {
            "먹는 것": ("나는 달고 시원한 배를 먹었다", "가을에는 사과와 배가 맛있다",
                      "시장에서 과일 가게 주인이 배를 팔았다"),
            "타는 것": ("우리는 배를 타고 바다를 건너 섬에 갔다", "항구에 큰 배가 들어왔다",
                      "선원들은 배에서 고기를 잡았다"),
        },
        "눈": {
            "몸": ("그녀는 눈을 감고 음악을 들었다", "아이의 눈이 별처럼 빛났다",
                  "그는 눈이 나빠서 안경을 쓴다"),
            "날씨": ("겨울에 하얀 눈이 많이 내렸다", "산에 눈이 쌓여 길이 막혔다",
                    "밤새 내린 눈 때문에 도로가 얼었다"),
        },
        "다리": {
            "몸": ("그는 다리를 다쳐서 걸을 수 없었다", "오래 걸어서 다리가 아프다",
                  "개는 네 다리로 걷는다"),
            "건너는 것": ("강을 건너는 다리가 새로 놓였다", "한강의 다리 위로 차가 지나간다",
                       "마을 사람들은 돌로 다리를 만들었다"),
        },
        "말": {
            "언어": ("그는 어려운 말을 쉽게 바꾸었다", "선생님의 말을 잘 들어라",
                   "그녀는 아무 말도 하지 않았다"),
            "동물": ("기사는 말을 타고 들판을 달렸다", "목장에서 말이 풀을 먹고 있다",
                   "경주에 나간 말이 가장 빨리 달렸다"),
        },
    },
}  # fmt: skip
