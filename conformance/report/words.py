"""The report's words in English and in Chinese. A sign never stands without its word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conformance.results import Check, Device, Outcome
from conformance.verdict import Verdict

Language = Literal["en", "zh"]

OUTCOME_SIGNS: dict[Outcome, str] = {
    "pass": "✅",
    "fail": "❌",
    "always_on": "🔒",
    "no_effect": "⚪",
    "refused": "⛔",
    "crash": "💥",
    "unsupported": "➖",
    "error": "🛠",
    "not_run": "⏸",
}

VERDICT_SIGNS: dict[Verdict, str] = {
    Verdict.WORKS: "✅",
    Verdict.WITH_COMPANIONS: "✅",
    Verdict.OTHER_SPELLING: "✅",
    Verdict.NOT_RUN: "⏸",
    Verdict.ALWAYS_ON: "🔒",
    Verdict.NO_EFFECT: "⚪",
    Verdict.WRONG_NUMBERS: "❌",
    Verdict.REFUSED: "⛔",
    Verdict.BROKEN: "💥",
    Verdict.ERROR: "🛠",
}


@dataclass(frozen=True)
class Words:
    """All that the report says in one language."""

    title: str
    started: str
    incomplete: str
    partial: str
    tables: dict[Literal["feature", "fused_operator"], str]
    columns: tuple[str, ...]
    checks: dict[Check, str]
    outcomes: dict[Outcome, str]
    verdicts: dict[Verdict, tuple[str, str]]
    devices: dict[Device, str]
    legend: str
    stack: str
    stack_columns: tuple[str, str, str]
    details: str
    documented: str
    companions: str
    note: str
    overrides: str
    exception: str
    figures: str
    evidence: str
    how_to_run: str


ENGLISH = Words(
    title="Support table",
    started="Run started {started}; device: {device}; backend: {backend}; precisions: {precisions}.",
    incomplete="INCOMPLETE: the run was interrupted. What is missing below was not run.",
    partial="PARTIAL: only these rows were selected: {rows}.",
    tables={"feature": "Features", "fused_operator": "Fused operators"},
    columns=(
        "Feature",
        "Configuration keys",
        "Status",
        "Verdict",
        "Accepted",
        "Engaged",
        "Parity",
        "Evidence",
        "Device",
        "Stack",
    ),
    checks={"accepted": "accepted", "engaged": "engaged", "parity": "parity"},
    outcomes={
        "pass": "pass",
        "fail": "fail",
        "always_on": "always on",
        "no_effect": "no effect",
        "refused": "refused",
        "crash": "crash",
        "unsupported": "unsupported",
        "error": "error of this suite",
        "not_run": "not run",
    },
    verdicts={
        Verdict.WORKS: ("works", "accepted, engaged and the same numbers, as documented"),
        Verdict.WITH_COMPANIONS: (
            "works with companions",
            "not as documented alone, but with the companion keys listed for the variant",
        ),
        Verdict.OTHER_SPELLING: (
            "works with another spelling",
            "not as documented, but with the other keys or values listed for the variant",
        ),
        Verdict.NOT_RUN: ("not run", "something was not run; the details say what it takes"),
        Verdict.ALWAYS_ON: ("always on", "the feature runs whether the key is on or off"),
        Verdict.NO_EFFECT: ("no effect", "the key is taken and changes nothing that runs"),
        Verdict.WRONG_NUMBERS: ("wrong numbers", "it runs, and the numbers differ by more than rounding"),
        Verdict.REFUSED: ("refused", "upstream says no, with an error that the details quote"),
        Verdict.BROKEN: ("broken", "it crashes, hangs, or runs something other than what the key promises"),
        Verdict.ERROR: ("error", "a fault of this suite; it says nothing about upstream"),
    },
    devices={"npu": "NPU", "emulated": "emulated NPU"},
    legend="Verdicts",
    stack="Stack",
    stack_columns=("Package", "Version", "Commit"),
    details="Details",
    documented="documented",
    companions="with",
    note="Note",
    overrides="works as",
    exception="raised",
    figures="figures",
    evidence="evidence",
    how_to_run="how to run",
)

CHINESE = Words(
    title="支持情况表",
    started="运行开始于 {started}；设备：{device}；后端：{backend}；精度：{precisions}。",
    incomplete="不完整（INCOMPLETE）：运行被中断，下文缺少的项均未运行。",
    partial="部分结果（PARTIAL）：只选择了以下行：{rows}。",
    tables={"feature": "特性", "fused_operator": "融合算子"},
    columns=("特性名称", "配置参数", "状态", "结论", "是否接受", "是否生效", "数值一致", "证据", "设备", "软件栈"),
    checks={"accepted": "是否接受", "engaged": "是否生效", "parity": "数值一致"},
    outcomes={
        "pass": "通过",
        "fail": "不通过",
        "always_on": "始终开启",
        "no_effect": "无效果",
        "refused": "被拒绝",
        "crash": "崩溃",
        "unsupported": "不支持",
        "error": "本套件出错",
        "not_run": "未运行",
    },
    verdicts={
        Verdict.WORKS: ("可用", "按文档写法被接受、生效，且数值一致"),
        Verdict.WITH_COMPANIONS: ("配合附加项可用", "仅按文档写法不可用，加上变体所列附加项后可用"),
        Verdict.OTHER_SPELLING: ("换用其他写法可用", "按文档写法不可用，用变体所列的其他键或值可用"),
        Verdict.NOT_RUN: ("未运行", "有检查未运行；所需条件见详情"),
        Verdict.ALWAYS_ON: ("始终开启", "无论该键开或关，特性都在运行"),
        Verdict.NO_EFFECT: ("无效果", "该键被接受，但不改变任何实际运行的内容"),
        Verdict.WRONG_NUMBERS: ("数值错误", "能运行，但数值差异超出舍入误差"),
        Verdict.REFUSED: ("被拒绝", "上游报错拒绝，错误原文见详情"),
        Verdict.BROKEN: ("损坏", "崩溃、挂起，或实际运行的内容与该键的承诺不符"),
        Verdict.ERROR: ("出错", "本套件自身的故障，与上游无关"),
    },
    devices={"npu": "NPU", "emulated": "仿真 NPU（emulated）"},
    legend="结论说明",
    stack="软件栈",
    stack_columns=("软件包", "版本", "提交"),
    details="详情",
    documented="文档写法",
    companions="配合",
    note="说明",
    overrides="可用写法",
    exception="异常",
    figures="数值",
    evidence="证据",
    how_to_run="如何运行",
)

WORDS: dict[Language, Words] = {"en": ENGLISH, "zh": CHINESE}
