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
    Verdict.NOT_APPLICABLE: "➖",
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
    untested: str
    deviation: str
    tables: dict[Literal["feature", "fused_operator"], str]
    columns: tuple[str, ...]
    operators: str
    operator_cell: str
    operator_columns: tuple[str, str, str, str, str, str]
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
    with_plain: str
    page: PageWords


@dataclass(frozen=True)
class PageWords:
    """What only the HTML page says. `columns` of runs: number, start, backend, route, device, state, stack."""

    language: str
    skip: str
    search: str
    search_hint: str
    filter_verdict: str
    filter_role: str
    shown: str
    nothing: str
    row: str
    verdict: str
    set_it: str
    variant: str
    copy: str
    copied: str
    run_with: str
    raised_at: str
    no_record: str
    left_out: str
    gone: str
    history: str
    history_hint: str
    share: str
    runs: str
    run_columns: tuple[str, str, str, str, str, str, str]
    complete: str
    interrupted: str
    this_run: str


ENGLISH = Words(
    title="Support table",
    started="Run started {started}; stack: {stack}; route: {route}; device: {device}; backend: {backend}; "
    "precisions: {precisions}.",
    incomplete="INCOMPLETE: the run was interrupted. What is missing below was not run.",
    partial="PARTIAL: only these rows were selected: {rows}.",
    untested="Untested combination",
    deviation="Deviation from the documented stack",
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
    operators="Operators",
    operator_cell="{cases} cases, worst error {ratio} the expected rounding error, {device}",
    operator_columns=("Family", "Outcome", "Cases", "Worst error over the expected rounding error", "Device", "What was seen"),
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
        Verdict.NOT_APPLICABLE: (
            "not applicable",
            "the switch concerns the other role, or leaves nothing to look for",
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
    with_plain="without MindSpeed",
    page=PageWords(
        language="Language",
        skip="Skip to the table",
        search="Search",
        search_hint="row, key, message",
        filter_verdict="Only these verdicts",
        filter_role="Roles",
        shown="lines shown of",
        nothing="No line matches the search and the filters.",
        row="Row",
        verdict="Verdict",
        set_it="How to set it",
        variant="variant",
        copy="Copy",
        copied="Copied",
        run_with="All overrides of a run, for a shell",
        raised_at="at",
        no_record="The run has no record of this check.",
        left_out="more, not shown here",
        gone="Rows of the run that the matrix no longer has:",
        history="History",
        history_hint="Oldest run on the left; the numbers are those of the list of runs.",
        share="Largest difference as a share of its bound; 1 is the bound.",
        runs="Runs",
        run_columns=("No.", "Started", "Backend", "Route", "Device", "State", "Stack"),
        complete="complete",
        interrupted="interrupted",
        this_run="shown on this page",
    ),
)

CHINESE = Words(
    title="支持情况表",
    started="运行开始于 {started}；软件栈：{stack}；途径：{route}；设备：{device}；后端：{backend}；精度：{precisions}。",
    incomplete="不完整（INCOMPLETE）：运行被中断，下文缺少的项均未运行。",
    partial="部分结果（PARTIAL）：只选择了以下行：{rows}。",
    untested="未经测试的组合",
    deviation="与文档软件栈的差异",
    tables={"feature": "特性", "fused_operator": "融合算子"},
    columns=("特性名称", "配置参数", "状态", "结论", "是否接受", "是否生效", "数值一致", "证据", "设备", "软件栈"),
    operators="算子",
    operator_cell="{cases} 个用例，最大误差为预期舍入误差的 {ratio}，{device}",
    operator_columns=("算子类", "结果", "用例数", "最大误差（相对预期舍入误差）", "设备", "所见"),
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
        Verdict.NOT_APPLICABLE: ("不适用", "该开关只涉及另一角色，或在此角色下没有可观察的内容"),
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
    with_plain="不用 MindSpeed 时",
    page=PageWords(
        language="语言",
        skip="跳到表格",
        search="搜索",
        search_hint="行、键、报错",
        filter_verdict="只看这些结论",
        filter_role="角色",
        shown="行已显示，共",
        nothing="没有符合搜索和筛选条件的行。",
        row="行",
        verdict="结论",
        set_it="如何设置",
        variant="变体",
        copy="复制",
        copied="已复制",
        run_with="一次运行的全部 override（用于 shell）",
        raised_at="位置",
        no_record="本次运行没有这项检查的记录。",
        left_out="项未在此显示",
        gone="运行中有、而当前矩阵已没有的行：",
        history="历史",
        history_hint="左边最早；编号见“运行列表”。",
        share="最大差异与其界限之比；1 即界限。",
        runs="运行列表",
        run_columns=("编号", "开始", "后端", "途径", "设备", "状态", "软件栈"),
        complete="完整",
        interrupted="被中断",
        this_run="本页所示",
    ),
)

WORDS: dict[Language, Words] = {"en": ENGLISH, "zh": CHINESE}
