"""Texts for real models: code, languages, signs that are rare, and prose."""
# ruff: noqa: RUF001 - signs that look like others are what is wanted

import pydoc_data.topics
import random
import unicodedata
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
LANGUAGES = {
    "English": "The old harbour town lies quietly beneath the hills; in 1987 it had 4,812 people, "
    "three bakeries and one lighthouse. \u201cWe don't need more,\u201d says the mayor.",
    "German": "Gestern Abend ging die Bürgermeisterin durch die Fußgängerzone, grüßte Jürgen und "
    "kaufte für 3,50 € zwölf Äpfel. Donaudampfschifffahrtsgesellschaften gibt es kaum noch.",
    "French": "Où est passé le garçon ? L'été dernier, il déjeunait près de l'œuvre inachevée, là "
    "où le naïf maître d'hôtel servait des crêpes à 12 h 30.",
    "Russian": "Вчера вечером поезд опоздал на сорок минут, и мы пили чай в буфете. Объявление "
    "повторили дважды; подъезд №7 был закрыт, ёлка стояла во дворе.",
    "Chinese": "昨天下午三点，图书馆里来了二百多名学生。"
    "老师说：\u201c这本书讲的是宋朝的城市。\u201d窗外下着小雨，没有人离开。",
    "Japanese": "駅前の喫茶店でコーヒーを飲みながら、２０１９年の手帳を読み返した。"
    "「また来週ね」と彼女は言った。ｶﾀｶﾅも少しある。",
    "Arabic": "ذهبتُ إلى السوق صباحًا واشتريتُ ٣ كيلوغرامات من التمر، ثم عدتُ إلى البيت قبل "
    "الظهر. هل تُحبّ القهوة؟",
    "Hindi": "कल शाम बारिश हुई और सड़कें भीग गईं। बच्चों ने १५ नावें काग़ज़ से बनाईं, फिर दादी ने उन्हें कहानी सुनाई।",
    "Korean": "어제 저녁에 친구와 한강을 걸었다. 바람이 차가웠지만 하늘은 맑았고, "
    "별이 일곱 개 보였다.",
}
_EMOJI = (
    *"😀🥲🤖🎉❤🧠🚀🌍☕✨",
    "❤️",
    "👍🏽",
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇫🇷🇯🇵",
    "1️⃣",
    "🧑🏿‍🚀",
)
_ODD = (
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA1)),
    *"\u00ad\u034f\u061c\u200b\u200d\u200e\u202e\u2028\u2029\u2060\u3000\ufeff\ufffc",
    *("e\u0301", "\u0323\u0307", "\u1100\u1161\u11a8", "\U0001d54f", "\U000e0041", "\U0010fffd"),
    *("Ⅷ", "½", "²³", "٤٥", "𝟙𝟚", "ǅ", "ß", "ﬃ", "İi", "Ω\u2126", "\r\n\r\n", " \t  \n", "\n\n1."),
    *(" " * count for count in (2, 3, 8, 17, 31, 32, 40, 64, 100)),
    *("\n" * count for count in (2, 5, 31, 33)),
    *("\t" * count for count in (2, 4, 33)),
)
_NUMBERS = ("3.14159", "1,000,000", "0x1F", "192.168.0.1", "2026-11-28T11:05", "-1e-9", "v2")


def mixed_text(num_bytes: int, special: list[str]) -> str:
    """Mix code, languages, emoji, control characters and special tokens; the same each time."""
    draw = random.Random(0)
    files = sorted((_REPOSITORY / "tokenmesh").rglob("*.py"))
    code = "".join(path.read_text() for path in files)
    docs = "".join(path.read_text() for path in sorted((_REPOSITORY / "docs").rglob("*.md")))
    words = [word for text in LANGUAGES.values() for word in text.split(" ")]
    pieces: list[str] = []
    size = 0
    while size < num_bytes:
        kind = draw.randrange(8)
        if kind < 2:
            source = (code, docs)[kind]
            start = draw.randrange(len(source))
            piece = source[start : start + draw.randrange(2000)]
        elif kind == 2:
            piece = draw.choice(list(LANGUAGES.values()))
        elif kind == 3:
            piece = " ".join(draw.choices(words, k=30))
        elif kind == 4:
            piece = "".join(draw.choices([*_EMOJI, *_NUMBERS, *words], k=15))
        elif kind == 5:
            piece = "".join(draw.choices([*_ODD, *_NUMBERS, *words, " "], k=20))
        elif kind == 6:
            piece = "".join(draw.choices([*special, *words, " ", "\n"], k=10))
        else:
            piece = "".join(_any_character(draw) for _ in range(60))
        pieces.append(piece + draw.choice(["", " ", "\n", "\n\n", "  "]))
        size += len(pieces[-1].encode())
    return "".join(pieces)


def _any_character(draw: random.Random) -> str:
    """Return a character of all planes that have letters and signs, more often of the first."""
    while True:
        each = chr(draw.randrange(draw.choice([0x250, 0x3000, 0x10000, 0x1FB00])))
        if unicodedata.category(each) not in ("Cs", "Cn", "Co"):
            return each


def prose(num_bytes: int) -> str:
    """English, with examples of code: Python's own manual, as this interpreter has it."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    assert text.isascii() or len(text) > num_bytes
    return text.encode()[:num_bytes].decode(errors="ignore")
