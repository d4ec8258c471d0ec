"""Tokenization of captions as COCO's evaluation does it, without Java: the rules of its Penn Treebank tokenizer.

They were written from the conventions of the Penn Treebank (contractions are split, punctuation is separated, brackets
and quotes are renamed) and from the reference's output on test strings. A rule is a token and the context that must
follow it. At each position, the rule with the longest token and context wins; of equals, the first. Rules are matched
on an outline of the line (see ``outline``), which keeps them short.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from vlm.data.text.words import spaceless_pattern

Action = Callable[[str], str]

CONTRACTIONS = frozenset(["cannot", "gonna", "gotta", "lemme", "gimme", "wanna"])
_ABBREVIATIONS = (
    "jan feb mar apr jun jul aug sept sep oct nov dec mon tues tue wed thurs thu fri ala ariz calif colo conn ct"
    " dak fla ga ind kans kan ky md mich minn mo mont neb nev okla penn tenn va vt wisc wis wyo inc cos co corp ltd"
    " plc rt bancorp bhd assn univ intl sys jr sr bros esq blvd bldg rd sq est ext tel etc al seq"
)
_STATES_IN_CAPITALS = "Az Ark Del Ill La Mass Miss Ore Pa Tex Wash"
_TITLES = (
    "adm adj adv assoc asst attys atty alex ave brig capt cf cie cmdr col comdr cpl dept det drs dr elec ens ft gen"
    " govs gov hon insp invt jos lieut lt maj messrs mlle mme mrs mr msgr ms mt natl pfc ph pres profs prof pvt reps"
    " rep rev sens sen sfc sgt spc ste st supts supt treas vs wm"
)
_NOT_ALL_IN_CAPITALS = "mfg mtg ptys pty ptes pte pptys ppty pptes ppte"
_NUMBERED = "nos no art figs fig prop pp op ca"
_SENTENCE_STARTS = (
    "A About According Additionally After An As At But Earlier He Her Here However If In It Last Many More Mr. Ms."
    " Now Once One Other Our She Since So Some Such That The Their Then There These They This We What When While Yet"
    " You"
)
_FILES = (
    "bat bmp cgi class cpp c dll docx doc exe gif gz html htm h jar java jpeg jpg mov mp3 pdf php pl png ppt ps py"
    " sql tar txt wav xml x zip"
)
# Words that may keep a following full stop, in lower case.
WORDS_WITH_STOP = frozenset(
    f"{_ABBREVIATIONS} {_STATES_IN_CAPITALS} {_TITLES} {_NOT_ALL_IN_CAPITALS} {_NUMBERED}".lower().split()
)

# Marks and modifiers that count as letters inside a word, as hexadecimal ranges.
_MARKS = """
2c2-2c5 2d2-2df 2e5-2eb 2ed 2ef-36f 375 378-379 384-385 3f6 483-487 55a-55f 591-5bd 5bf 5c1-5c2 5c4-5c5 5c7 615-61a
64b-65e 670 6d6-6e4 6e7-6ed 6fd-6fe 70f 711 730-74c 7a6-7b0 7eb-7f3 900-903 93c 93e-94e 951-955 962-963 981-983 9bc
9be-9c4 9c7-9c8 9cb-9cd 9d7 9e2-9e3 a01-a03 a3c a3e-a4f a81-a83 abc abe-acf b82 bbe-bc2 bc6-bc8 bca-bcd c01-c03
c3e-c56 d3e-d44 d46-d48 e31 e34-e3a e47-e4e eb1 eb4-ebc ec8-ecd 1885-1886
"""

# Symbols that are tokens; characters that are neither in a token nor among these are dropped.
_SYMBOLS = """
24-27 2a-2c 2f 3a-3e 5c 5e 60 7c 7e a1 a5-a9 ac ae-b4 b6-b9 bf d7 f7 37e 387 589 5be 5c0 5c3 5c6 5f3-5f4 600-603
606-60c 614 61b 61e-61f 66a 66d 6d4 700-70d 7f6-7f8 964-965 e3f e4f 1fbd 2016-2017 201a 201e-2023 2030-2038 203b
203e-2042 2044 2070 2074-207e 2080-208e 20a4 2100-2101 2103-2106 2108-2109 2114 2116-2118 211e-2123 2125 2127 2129
212e 213a-213b 2140-2144 214a-214d 214f 2155-215e 2190-2bff 3001-3002 3012 30fb ff01-ff0f ff1a-ff20 ff3b-ff40
ff5b-ff65 ffe0-ffe1 ffe5-ffe6
"""

# Characters that replace every non-ASCII letter, mark and digit in an outline.
A_LETTER, _A_MARK, A_DIGIT = "\u00e9", "\u0301", "\u0660"

_LETTER = f"[A-Za-z{A_LETTER}]"
_DIGIT = f"[0-9{A_DIGIT}]"
_ALNUM = f"[A-Za-z0-9{A_LETTER}{A_DIGIT}]"
_WORD_LETTER = f"(?:[A-Za-z{A_LETTER}{_A_MARK}\xad]|(?i:&[aeiou](?:acute|grave|uml);))"
_PART = f"{_WORD_LETTER}(?:{_WORD_LETTER}|{_DIGIT})*"
_WORD = f"{_PART}(?:[.!?]{_PART})*"
_APOSTROPHE = "(?:['\x92\u2019]|(?i:&apos;))"
_QUOTE = "(?:['\x92\u2019`\x91\u2018\u201b]|(?i:&apos;))"
_HYPHEN = "[-_\u058a\u2010\u2011]"
_SPACE = "[ \t\xa0\u2000-\u200a\u3000\n]"
_STOP = "[,;:\u3001]"
# Runs are bounded, so that a long text without spaces does not take quadratic time.
_BOUNDED = "{0,254}"

_NAME = "[A-Za-z][A-Za-z0-9_:.-]*"
_ATTRIBUTE = f"{_NAME}(?: *= *(?:'[^\r\n']*'|\"[^\r\n\"]*\"))?"
_TAG = f"<(?:[!?][A-Za-z-][^>\r\n]*|{_NAME}(?: +{_ATTRIBUTE})* */?|/{_NAME}) *>"

_BRACKETS = {"(": "-LRB-", ")": "-RRB-", "[": "-LSB-", "]": "-RSB-", "{": "-LCB-", "}": "-RCB-"}
_STRAIGHT = {"\x92": "'", "\u2019": "'", "\x91": "`", "\u2018": "`", "\u201b": "`"}
_QUOTES = {
    "\u203a": "'",
    "\u2039": "`",
    "\x93": "``",
    "\u201c": "``",
    "\xab": "``",
    "\x94": "''",
    "\u201d": "''",
    "\xbb": "''",
}
_FRACTIONS = {"\xbc": "1/4", "\xbd": "1/2", "\xbe": "3/4", "\u2153": "1/3", "\u2154": "2/3"}


class Scanner(NamedTuple):
    """All rules in one pattern, because one call is far cheaper than sixty.

    Args:
        pattern: One group per rule, for its token with the context; if there is a context, the next group is the token.
        tokens: For each group, the group of the token.
        actions: For each group, the action of its rule, which returns the final form of the token.
    """

    pattern: re.Pattern[str]
    tokens: list[int]
    actions: list[Action]

    def longest(self, shape: str, position: int) -> tuple[int, Action] | None:
        """End of the token of the rule that wins at a position, and its action; None if no rule matches."""
        match = self.pattern.match(shape, position)
        assert match is not None
        lengths = list(map(len, match.groups("")))  # 0 if a rule does not match
        longest = max(lengths)
        if not longest:
            return None
        number = lengths.index(longest)
        return match.end(self.tokens[number]), self.actions[number]


def outline(line: str) -> str:
    """Replaces every non-ASCII letter, mark and digit by a representative of its kind."""
    return line if line.isascii() else "".join(map(_kind, line))


@cache
def _kind(char: str) -> str:
    # The reference knows the Basic Multilingual Plane only; characters above it (emoji) are not part of words.
    if char.isascii() or ord(char) > 0xFFFF:
        return char
    if char.isalpha():
        return A_LETTER
    if char in _marks():
        return _A_MARK
    return A_DIGIT if unicodedata.category(char) == "Nd" else char


@cache
def _marks() -> frozenset[str]:
    return _chars(_MARKS)


@cache
def symbols() -> frozenset[str]:
    """Characters that are tokens by themselves."""
    return _chars(_SYMBOLS)


@cache
def scanner() -> Scanner:
    """All rules, in the order that breaks ties."""
    word_start = f"[A-Za-z0-9{A_LETTER}{A_DIGIT}{_A_MARK}\xad&"
    kinds = [  # the beginning of each kind of rule, so that most kinds are skipped
        (f"{word_start}'\x92\u2019]", _words()),
        ('<?[^ \t\n\r\x0c"<>]{0,256}[.@#:]', _addresses()),
        ("[A-Za-z]{1,8}\\.", _abbreviations()),
        ("[^a-z]", _numbers()),
        (f"{word_start}-]", _compounds()),
        (f"[^A-Za-z0-9{A_LETTER}{A_DIGIT}]|x_", _signs()),
    ]
    tried, tokens, actions = list[str](), list[int](), list[Action]()
    for beginning, rules in kinds:
        tried.append(f"(?:(?={beginning})")
        for token, context, action in rules:
            tried.append(f"(?:(?=(({token})(?:{context})))|)" if context else f"(?:(?=({token}))|)")
            groups = 2 if context else 1
            tokens += groups * [len(tokens) + groups]
            actions += groups * [action]
        tried.append("|)")
    return Scanner(re.compile("".join(tried)), tokens, actions)


def _words() -> list[tuple[str, str, Action]]:
    soft = _replace({"\xad": ""})
    clitic = f"{_APOSTROPHE}(?i:[msd]|re|ve|ll)"
    after = f"{_APOSTROPHE}(?:n{_APOSTROPHE}?|em|till?|[2-9]0s|cause)"
    before = f"(?:[ldj]|dunkin|somethin|ol){_APOSTROPHE}"
    fixed = _any("cont'd. nor'easter c'mon e'er s'mores ev'ry li'l nat'l o'clock").replace("'", _APOSTROPHE)
    elided = f"(?:{_ALNUM}+{_HYPHEN})*[dDoOlL]{_QUOTE}{_ALNUM}{{2,}}(?:{_HYPHEN}{_ALNUM}+)*"
    return [
        ("(?i:can)", "(?i:not)", _keep),
        ("(?i:gon|wan)", "(?i:na)", _keep),
        ("(?i:got)", "(?i:ta)", _keep),
        ("(?i:gim|lem)", "(?i:me)", _keep),
        ("'[tT]", "(?i:is|was)", _keep),
        (_WORD, clitic, soft),
        ("[A-Za-z\xad]*[A-MO-Za-mo-z]\xad*", f"[nN]{_QUOTE}[tT]", soft),
        (_WORD, "", soft),
        (f"(?i:{after}|{before}|{fixed})", "", _keep),
        (f"{_APOSTROPHE}[0-9][0-9]", _SPACE, _keep),
        (f"[A-HJ-XZn]{_QUOTE}{_LETTER}{_LETTER}+", "", _keep),
        (f"{_LETTER}+[aeiouyAEIOUY]{_QUOTE}[aeiouA-Z]{_LETTER}*|[oO]{_QUOTE}[oO]", "", _keep),
        (f"[yY]{_APOSTROPHE}", _LETTER, _keep),
        (elided, "", _keep),
        (f"{elided}\\.", _STOP, _keep),
        (clitic, "[^A-Za-z]", _straighten),
        (f"[nN]{_QUOTE}[tT]", "[^A-Za-z]", _straighten),
        ("'", "[A-Za-z][^ \t\n\r\xa0]", _keep),
        (clitic, "", _straighten),
    ]


def _addresses() -> list[tuple[str, str, Action]]:
    blank = ' \t\n\x0c\r"<>'
    end = f"[^{blank}|.!?(){{}},-]"
    # In a bare host name, the reference excludes the range from comma to underscore, with capitals and digits.
    bare = f"(?:[^{blank}`'|!(){{}},-_$]{{1,255}}\\.)+(?i:com|net|org|edu)"
    host = f"(?:www\\.(?:[^{blank}|.!?(){{}},]+\\.)+[a-zA-Z]{{2,4}}|{bare})"
    user = f"[a-zA-Z0-9][^{blank}|()\xa0{{}}]{_BOUNDED}"
    domain = f"[^{blank}|(){{}}.\xa0]+"
    return [
        (f"https?://[^{blank}|(){{}}]+{end}", "", _keep),
        (host, "", _keep),
        (f"{host}/[^{blank}|()]+{end}", "", _keep),
        (f"(?:(?i:&lt;)|<)?{user}@(?:{domain}\\.)*{domain}(?:(?i:&gt;)|>)?", "", _keep),
        ("@[a-zA-Z_][a-zA-Z_0-9]*", "", _keep),
        (f"#{_WORD_LETTER}+", "", _keep),
    ]


def _abbreviations() -> list[tuple[str, str, Action]]:
    states, starts = _any(_STATES_IN_CAPITALS, capitalised=True), _any(_SENTENCE_STARTS, capitalised=True)
    common = f"(?:(?i:{_any(_ABBREVIATIONS)}|ed\\.d|ph\\.d)|[Pp]?[Pp][Tt][ey][Ss]?|{states})\\."
    return [
        (common, "(?s:..)", _keep),
        (common, "", _keep),
        (f"(?:(?i:{_any(_TITLES)})|[Mm][ft][Gg])\\.", "", _keep),
        ("(?:[A-Za-z]\\.)+", "", _keep),
        ("[A-Za-z]", f"\\.{_SPACE}+(?:{starts}{_SPACE}|{_TAG})", _keep),
        (f"(?i:{_any(_NUMBERED)})\\.", f"{_SPACE}*{_DIGIT}", _keep),
    ]


def _numbers() -> list[tuple[str, str, Action]]:
    area = "(?:\\([0-9]{2,3}\\)[ \xa0]?|(?:\\+\\+?)?(?:[0-9]{2,4}[- \xa0])?[0-9]{2,4}[- \xa0])"
    dotted = "(?:(?:\\+\\+?)?[0-9]{2,4}\\.)?[0-9]{2,4}\\.[0-9]{3,4}\\.[0-9]{3,5}"
    fraction = f"(?:{_DIGIT}{{1,4}}[- \xa0])?{_DIGIT}{{1,4}}(?:\\\\?/|\u2044){_DIGIT}{{1,4}}"
    return [
        (f"{_DIGIT}{{1,2}}[-/]{_DIGIT}{{1,2}}[-/]{_DIGIT}{{2,4}}", "", _keep),
        (f"[-+]?(?:{_DIGIT}*(?:[.:,\xad\u066b\u066c]{_DIGIT}+)+|{_DIGIT}+)", "", _replace({"\xad": ""})),
        ("[\u207a\u207b\u208a\u208b]?(?:[\u2070\xb9\xb2\xb3\u2074-\u2079]+|[\u2080-\u2089]+)", "", _keep),
        (fraction, "", _replace({" ": "\xa0"})),
        ("[\xbc\xbd\xbe\u2153-\u215e]", "", _replace(_FRACTIONS)),
        ("[A-Z]*\\$|#", "", _keep),
        ("\xa2", "", _to("cents")),
        ("\xa3", "", _to("#")),
        ("[\x80\xa4\u20a0\u20ac]", "", _to("$")),
        (f"{area}[0-9]{{3,4}}[- \xa0]?[0-9]{{3,5}}|{dotted}", "", _replace(_BRACKETS | {" ": "\xa0"})),
    ]


def _compounds() -> list[tuple[str, str, Action]]:
    soft = _replace({"\xad": ""})
    hyphened = f"[A-Za-z0-9][A-Za-z0-9.,\xad]{_BOUNDED}(?:-(?:[A-Za-z]\\.(?:[A-Za-z]\\.)+|[A-Za-z0-9\xad]+))+"
    joined = f"{_ALNUM}+(?:{_HYPHEN}{_ALNUM}+)*"
    capitals = "[A-Z]+(?:(?:(?i:&amp;)|[+&])[A-Z]+)+"
    file = f"(?:{_ALNUM}|\xad)"
    side = "[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}"
    return [
        (f"{file}+(?:\\.{file}+)*\\.(?i:{_any(_FILES)})", f"{_SPACE}|[.,!?]", _keep),
        (hyphened, "", soft),
        (joined, "", soft),
        (f"{hyphened}\\.", _STOP, soft),
        (f"{joined}\\.", _STOP, soft),
        (f"{_WORD}\\.", _STOP, soft),
        (capitals, "", _ampersand),
        (f"{capitals}\\.", _STOP, _ampersand),
        (f"{side}(?:\\\\?/{side}){{1,2}}", "", _keep),
        ("-(?:[LR][RCS]B|[lr][rcs]b)-|C\\.D\\.s|pro-|anti-|[Cc]\\+\\+|[CFcf]#", "", _keep),
        ("(?i:s(?:&|&amp;)(?:p-500|ls))", "", _ampersand),
    ]


def _signs() -> list[tuple[str, str, Action]]:
    faces = "[-^x=~<>']_[-^x=~<>']|\\([-^x=~<>'][_.]?[-^x=~<>']\\)"
    return [
        (_TAG, "", _replace({" ": "\xa0"})),
        ("(?i:&(?:md|mdash|ndash);)|[\x96\x97\u2013-\u2015]|----?", "", _to("--")),
        ("-+", "", _keep),
        ("(?i:&amp;)", "", _to("&")),
        ("(?i:&lt;)", "", _to("<")),
        ("(?i:&gt;)", "", _to(">")),
        ('&(?:quot|apos);|(?i:&nbsp;)|"', "", _to("'")),  # those of quotes are replaced in lower case only
        ("(?i:&(?:quot|apos|ht|tl|ur|lr|qc|ql|qr|odq|cdq|#[0-9]+);)", "", _keep),
        ("[<>]?[:;=][-o*']?[()DPdpO\\\\{@|\\[\\]]", "[^A-Za-z0-9]", _replace({"(": "-LRB-", ")": "-RRB-"})),
        (faces, "", _replace(_BRACKETS)),
        ("\\.{3,5}|(?:\\.[ \xa0]){2,4}\\.|\u2026", "", _to("...")),
        ("@+|#+|_+|\\*+|(?:\\\\\\*){1,3}|<<|>>|[?!]+|''?", "", _keep),
        ("[`\x91-\x94\xab\xbb\u2018-\u201f\u2039\u203a]{1,2}", "", _replace(_STRAIGHT | _QUOTES)),
        ("[(){}\\[\\]]", "", _replace(_BRACKETS)),
    ]


def _any(words: str, capitalised: bool = False) -> str:
    """An alternation of words; capitalised ones begin as written and continue in either case."""
    parts = [f"{word[0]}(?i:{re.escape(word[1:])})" if capitalised else re.escape(word) for word in words.split()]
    return f"(?:{'|'.join(parts)})"


def _chars(spans: str) -> frozenset[str]:
    ends = [[int(end, 16) for end in span.split("-")] for span in spans.split()]
    return frozenset(chr(code) for end in ends for code in range(end[0], end[-1] + 1))


def _keep(text: str) -> str:
    return text


def _ampersand(text: str) -> str:
    return re.sub("(?i)&amp;", "&", text)


def _straighten(text: str) -> str:
    return _replace(_STRAIGHT)(text.replace("&apos;", "'"))


def _to(token: str) -> Action:
    return lambda text: token


def _replace(table: dict[str, str]) -> Action:
    translation = str.maketrans(table)
    return lambda text: text.translate(translation)


_PUNCTUATION = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_PLAIN = re.compile("[A-Za-z, ]*[.]?[ ]*")
_PLAIN_WORDS = re.compile(f"(?:[A-Za-z{A_LETTER}]+ +)+")
# Parts of a line between spaces whose tokens do not depend on the context. Only tags, and numbers and stops before
# others of their kind, extend across a space; and a single letter with a stop depends on what follows.
_LETTERS = f"A-Za-z{A_LETTER}"
_INDEPENDENT = re.compile(
    f"(?:[^\\s<]{{0,39}}[^\\s<.]|(?:[^\\s<]{{0,39}}[^\\s\\w<.;'`\x91\x92\u2018\u2019\u201b])?[{_LETTERS}]{{2,40}}[.])"
    f"(?= +[^ .0-9{A_DIGIT}]| *\n)"
)


def tokenize(caption: str) -> list[str]:
    """Splits a caption into lower-case tokens without punctuation.

    Args:
        caption: Any text; characters that the reference cannot tokenize, such as emoji, are dropped.
    """
    plain = _tokenize_plain(caption)
    return [token for token in _tokenize(caption) if token not in _PUNCTUATION] if plain is None else plain


def _tokenize_plain(caption: str) -> list[str] | None:
    """Tokens of a caption of plain words, commas and a final full stop; None if other rules may apply."""
    if _PLAIN.fullmatch(caption) is None:
        return None
    words = caption.lower().replace(",", " ").split()
    if words and words[-1].endswith("."):
        last = words.pop()[:-1]
        if len(last) == 1 or last in WORDS_WITH_STOP:
            return None
        words.extend([last] if last else [])
    return words if CONTRACTIONS.isdisjoint(words) else None


def _tokenize(caption: str) -> list[str]:
    # Rules look at what follows a token, so the line ends with a line feed.
    line = caption + "\n"
    shape, tokens, position = outline(line), list[str](), 0
    while position < len(caption):
        if line[position] == " ":
            position += 1
            continue
        plain = _PLAIN_WORDS.match(shape, position)
        if plain and CONTRACTIONS.isdisjoint(words := line[position : plain.end()].lower().split()):
            tokens.extend(words)
            position = plain.end()
        elif part := _INDEPENDENT.match(shape, position):
            tokens.extend(_tokenize_part(line[position : part.end()]))
            position = part.end()
        else:
            token, position = _next_token(line, shape, position)
            tokens.append(token)
    return [token for token in tokens if token]


@lru_cache(maxsize=2**15)
def _tokenize_part(part: str) -> list[str]:
    """Tokens of a part of a line that `_INDEPENDENT` matches; cached, because captions repeat the same parts."""
    line = f"{part} x\n"
    shape, tokens, position = outline(line), list[str](), 0
    while position < len(part):
        token, position = _next_token(line, shape, position)
        tokens.append(token)
    return tokens


def _next_token(line: str, shape: str, position: int) -> tuple[str, int]:
    """The token at a position, which may be empty, and the position after it."""
    end, token = position, line[position]  # if no rule matches
    if match := scanner().longest(shape, position):
        end, action = match
        token = action(line[position:end])
    return (token.lower() if end > position or token in symbols() else ""), max(end, position + 1)


@dataclass(frozen=True)
class Units:
    """Tokenization of a metric.

    Args:
        name: "words" or "characters".
        cut: Splits a caption into units, in lower case and without punctuation.
    """

    name: str
    cut: Callable[[str], list[str]]

    @property
    def note(self) -> str:
        """A note for readers of scores; empty for words, which published scores use."""
        return "" if self is WORDS else "scored by characters: the script of the references has no spaces between words"


def characters(caption: str) -> list[str]:
    """Splits text of scripts without spaces into characters with their marks, and other text into words."""
    tokens: list[str] = []
    for part in spaceless_pattern().split(caption):  # includes the captured separators
        tokens += [part] if spaceless_pattern().fullmatch(part) else tokenize(part)
    return [token for token in tokens if any(map(str.isalnum, token))]


WORDS, CHARACTERS = Units("words", tokenize), Units("characters", characters)


def units_of(captions: Iterable[str]) -> Units:
    """The units for a set of captions: characters if most letters are of a script without spaces."""
    letters = unspaced = 0
    for caption in captions:
        letters += sum(map(str.isalpha, caption))
        unspaced += 0 if caption.isascii() else sum(map(str.isalpha, "".join(spaceless_pattern().findall(caption))))
    return CHARACTERS if 2 * unspaced > letters else WORDS
