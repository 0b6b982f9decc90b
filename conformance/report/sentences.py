"""The suite's own sentences in another language, by the form of the English one that results hold.

What upstream says (exceptions, frames), overrides, commands and names of facts stay as they are, also inside a sentence.
`tests/test_report_sentences.py` asks for every sentence of the published results.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from conformance.report.words import CHINESE, Language
from conformance.results import OUTCOMES

#: A longer text is no sentence of ours.
_LONGEST = 4000

_RANKS = r"ranks? [\d, ]+"
_QUANTITY = r"\w+(?: \((?:rms )?error against float64\))?"
_WHERE_FORMS = (
    r"sequence \d+, response token \d+(?: on rank \d+)?|global(?: on rank \d+)?|\S+\[\d+\](?: on rank \d+)?"
    r"|only on one side: .+|\S+: shape \(.*\), wanted \(.*\)"
)
_FORM = r"plain|\+|\+\+|inherited"
_FORMS = {"plain": "直接写", "inherited": "继承"}


def said(text: str, language: Language) -> str:
    """The text in that language: translated if it is a sentence of this suite, else as it is."""
    return text if language == "en" or len(text) > _LONGEST else _chinese(text)


def _chinese(text: str) -> str:
    for pattern, translate in _SENTENCES:
        match = pattern.fullmatch(text)
        if match:
            return translate(match)
    return text


Translate = Callable[[re.Match[str]], str]


def _fixed(template: str) -> Translate:
    """What the pattern's groups hold goes into the template as it is."""
    return lambda match: template.format(*match.groups(default=""))


def _with_rest(template: str) -> Translate:
    """Like `_fixed`, for a sentence whose last group is another sentence or an upstream text."""
    return lambda match: template.format(*match.groups()[:-1], _chinese(match[match.re.groups]))


def _written(match: re.Match[str]) -> str:
    forms = "、".join(_form(form) for form in match[1].split(" or "))
    traps = "；".join(_chinese(trap) for trap in match[2].split("; ")) if match[2] else ""
    return f"可用写法：{forms}" + (f"；陷阱：{traps}" if traps else "")


def _drops(match: re.Match[str]) -> str:
    return (f"{_form(match[1])} " if match[1] else "") + f"会丢掉继承来的 {match[2]}"


def _form(name: str) -> str:
    return _FORMS.get(name, name)


def _evidence(match: re.Match[str]) -> str:
    holds, side, fact, seen, wanted, ranks = match.groups()
    mark = {"yes": "成立", "NO": "不成立"}[holds]
    when = {"on": "开", "off": "关", "change": "变化"}[side]
    shown = re.sub(r"\brank (\d+): absent\b", r"rank \1: 无", seen).replace("no rank reported", "没有 rank 报告")
    shown = shown.replace(" (off: ", "（关时：").replace(")", "）") if side == "change" else shown
    asked = wanted.replace("the value when off", "关时的值")
    return f"{mark} [{when}] {fact}：{shown}；要求{'任一' if ranks == 'any' else '每个'} rank {asked}"


def _something_else(match: re.Match[str]) -> str:
    seen = re.sub(r" on rank (\d+): (\S+) \(off: ([^)]*)\)", r"，rank \1：\2（关时：\3）", match[1])
    return f"该键改变了承诺以外的内容：{seen.replace('; ', '；')}"


def _unread(match: re.Match[str]) -> str:
    return f"这一步中没有代码读取 {match[1]}" + (f"；相近且被读取的有：{match[2]}" if match[2] else "")


def _figure(match: re.Match[str]) -> str:
    difference, bound, where = match.groups()
    return f"{difference}（界限 {bound}）{_where(where)}"


def _where(text: str) -> str:
    """A clause that follows the number."""
    if text.startswith("only on one side: "):
        return text.replace("only on one side: ", "；只有一侧有：", 1)
    if ": shape (" in text:
        return "；" + re.sub(r": shape (\(.*\)), wanted (\(.*\))", r" 的形状为 \1，应为 \2", text)
    place = re.sub(r"^sequence (\d+), response token (\d+)", r"序列 \1 的回答 token \2", text)
    place = re.sub(r" on rank (\d+)$", r"，rank \1", re.sub(r"^global\b", "全局", place))
    return "，位于" + (" " if place[0].isascii() else "") + place


def _quantity(name: str) -> str:
    shown = _chinese(name)
    return shown + (" " if shown[-1].isascii() else "")


def _within(match: re.Match[str]) -> str:
    return f"{_quantity(match[1])}相差至多 {match[2]}" + (f"，界限 {match[3]}" if match[3] else "")


def _differs(match: re.Match[str]) -> str:
    return f"{_quantity(match[1])}相差 {match[2]}（界限 {match[3]}）{_where(match[4])}"


def _without_mindspeed(match: re.Match[str]) -> str:
    return f"{CHINESE.outcomes[match[1]]}：{_chinese(match[2])}"  # type: ignore[index]


def _worst_case(template: str) -> Translate:
    def translate(match: re.Match[str]) -> str:
        cases, ratio, where = match.groups()
        where = re.sub(r"^(.*) of drawn case$", r"\1，随机用例", where)
        return template.format(cases, ratio, re.sub(r"^(.*) of named case (\S+)$", r"\1，指定用例 \2", where))

    return translate


_PATTERNS: tuple[tuple[str, Translate], ...] = (
    # accepted
    (rf"written ((?:{_FORM})(?: or (?:{_FORM}))*)(?:; trap: (.+))?", _written),
    (rf"(?:({_FORM}) )?drops inherited (.+)", _drops),
    (r"taken", _fixed("接受")),
    (r"plain", _fixed(_FORMS["plain"])),
    (r"inherited", _fixed(_FORMS["inherited"])),
    (r"reaches no engine: (.+)", _fixed("未到达任何引擎：{0}")),
    (r"composes, but (.+) does not reach (\w+)'s engine", _fixed("配置可以组合，但 {0} 未到达 {1} 的引擎")),
    # engaged
    (r"on as promised, off without it", _fixed("开启时如承诺所述，关闭时没有")),
    (r"the same runs with the key on and off: it cannot be switched off", _fixed("开关该键时运行的内容相同：无法关闭")),
    (r"what the key promises runs with it off, too", _fixed("关闭该键时，其承诺的内容也在运行")),
    (r"nothing that ran differs between on and off", _fixed("开与关之间，运行的内容没有差别")),
    (r"the key changes something else than promised: (.+)", _something_else),
    (r"cannot be switched off: (.*)", _with_rest("无法关闭：{0}")),
    (r"the evidence is missing, and off fails as well: (.*)", _with_rest("缺少证据，且关闭时也失败：{0}")),
    (r"nothing reads (.+?) in this step(?:; like it, and read: (.+))?", _unread),
    (r"the row names no evidence for (\w+): it concerns the other role only", _fixed("该行没有 {0} 的证据：它只涉及另一角色")),
    (r"(yes|NO) \[(on|off|change)\] (\S+): (.*); wanted (.+?) on (any|every) rank", _evidence),
    # parity
    (rf"({_QUANTITY}) within (\S+?)(?:, bound (\S+))?", _within),
    (rf"({_QUANTITY}) differs by (\S+) \(bound (\S+)\), ({_WHERE_FORMS})", _differs),
    (rf"(\S+) \(bound (\S+)\) at ({_WHERE_FORMS})", _figure),
    (r"(\w+) \(error against float64\)", _fixed("{0}（相对 float64 的误差）")),
    (r"(\w+) \(rms error against float64\)", _fixed("{0}（相对 float64 的均方根误差）")),
    (r"the row is not for (\w+): see its note", _fixed("该行不适用于 {0}：见其说明")),
    (r"only in (\w+), which verl's own validation refuses: (.*)", _with_rest("仅在 verl 自身校验会拒绝的 {0} 下出现：{1}")),
    (r"exporting the weights: (.*)", _with_rest("导出权重时：{0}")),
    # any check
    (r"only MindSpeed has this, and this run is plain: (.*)", _fixed("只有 MindSpeed 有此功能，而本次运行的后端是 plain：{0}")),
    (rf"deadline of (\S+) s passed; ({_RANKS}) stuck", _fixed("超过 {0} 秒的时限；{1} 未结束")),
    (r"rank (\d+) exited with code (-?\d+) without a result", _fixed("rank {0} 以退出码 {1} 结束，没有结果")),
    (r"rank (\d+) was killed by (\S+)", _fixed("rank {0} 被 {1} 终止")),
    (r"no upstream frame", _fixed("没有上游的调用帧")),
    (rf"({'|'.join(OUTCOMES)}): (.*)", _without_mindspeed),
    # operators
    (
        r"(\d+) cases, worst error (\S+) times the expected rounding error \((.*)\)",
        _worst_case("{0} 个用例，最大误差为预期舍入误差的 {1} 倍（{2}）"),
    ),
    # what differs from the tested stack
    (r"(\S+)'s checkout has changes of its own", _fixed("{0} 的检出目录有未提交的改动")),
    (r"(\S+ \S+) \(the stack pins (.+)\)", _fixed("{0}（软件栈固定为 {1}）")),
    (r"MindSpeed branch (\S+) \(the stack is tested with (\S+)\)", _fixed("MindSpeed 分支 {0}（软件栈以 {1} 测试）")),
    (
        r"(\S+) is installed: the suite stands in for it, and is tested without",
        _fixed("已安装 {0}：本套件以替代品代替它，且在没有它时测试"),
    ),
)
_SENTENCES = tuple((re.compile(pattern), translate) for pattern, translate in _PATTERNS)
