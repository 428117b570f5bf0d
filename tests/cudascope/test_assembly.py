"""Changes to a kernel's assembly, as samples of what gcc writes: before and after."""

import pytest

from cudascope.translate.assembly import (
    changed,
    has_empty_loop,
    with_alignments,
    with_checked_divisions,
    with_dynamic_memory,
    with_gaps,
    with_runtime_functions,
)

DYNAMIC = "\nsimt_dynamic:\n\t.zero\t232448\n"


@pytest.mark.parametrize(
    ("loop", "empty"),
    [
        (".L3:\n\tjmp\t.L3\n", True),
        (".L3:\n\t.loc 1 7 5\n\t.p2align 4,,10\n\tjmp\t.L3\n", True),
        (".L3:\n# comment\n\tjmp .L3\n", True),
        (".L3:\n\tb\t.L3\n", True),  # aarch64
        (".L3:\n\tjmp\t.L4\n", False),
        (".L3:\n\tjmp\t.L30\n", False),
        (".L3:\n\tcmpl\t$0, (%rax)\n\tje\t.L3\n", False),
        (".L3:\n\tmovl\t(%rax), %edx\n\tjmp\t.L3\n", False),
    ],
)
def test_a_loop_that_does_nothing_is_told(loop, empty):
    assert has_empty_loop("\tmovq\t%rdi, %rax\n" + loop + "\tret\n") == empty


CALLS = "\tcall\t{}@PLT\n", "\tjmp\t{}@PLT\n", "\tbl\t{}\n\tnop\n", "\tb\t{}\n"  # of x86-64, then of aarch64
OF_THE_RUNTIME = {
    "simt_shared_at": "__tls_get_addr",
    "simt_malloc": "malloc _Znwm _Znam",
    "simt_free_memory": "free _ZdlPv _ZdlPvm _ZdaPv",
    "simt_host_exit": "exit _exit",
    "simt_throw": "__cxa_throw",
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_go_to_the_runtime(call):
    for own, functions in OF_THE_RUNTIME.items():
        for function in functions.split():
            assert with_runtime_functions(call.format(function)) == call.format(own)
    for other in ("at_exit", "my_malloc", "mallocs", "freed", ".L3"):
        assert with_runtime_functions(call.format(other)) == call.format(other)
    definition = call.format("f") + "free:\n\tret\n"
    assert with_runtime_functions(definition) == definition


@pytest.mark.parametrize(
    ("use", "defined"),
    [
        ("\tleaq\trow@tlsgd(%rip), %rdi\n", "\t.globl row\n\t.set row, simt_dynamic\n"),
        (  # aarch64
            "\tadrp\tx0, :tlsgd:row\n\tadd\tx0, x0, #:tlsgd_lo12:row\n",
            "\t.globl row\n\t.set row, simt_dynamic\n",
        ),
        (
            "\tleaq\tb@tlsgd(%rip), %rdi\n\tleaq\ta@tlsld(%rip), %rdi\n",
            "\t.globl a\n\t.set a, simt_dynamic\n\t.globl b\n\t.set b, simt_dynamic\n",
        ),
        ("\tleaq\trow@tlsgd(%rip), %rdi\nrow:\n\t.zero\t64\n", ""),
        ("\tmovq\trow@GOTPCREL(%rip), %rax\n", ""),
        ("\t.long\tsimt_dynamic@dtpoff, 0\n", ""),
    ],
)
def test_extern_shared_arrays_are_the_dynamic_memory(use, defined):
    assert with_dynamic_memory(use + DYNAMIC) == use + DYNAMIC + defined
    assert with_dynamic_memory(use) == use


# A thread of aarch64 reaches `brk 0xd1f` where the division of x86-64 is a fault. Nothing else changes: no flag and no
# register, also if the division uses the register that would be free.
@pytest.mark.parametrize(
    ("division", "checks"),
    [
        ("udiv\tw0, w1, w2", ["cbnz\tw2, . + 8", "brk\t0xd1f"]),
        ("udiv\tx9, x9, x10", ["cbnz\tx10, . + 8", "brk\t0xd1f"]),
        (
            "sdiv\tw0, w1, w2",
            [
                *("cbnz\tw2, . + 8", "brk\t0xd1f", "str\tx9, [sp, -16]!", "add\tw9, w2, 1", "cbnz\tw9, . + 16"),
                *("eor\tw9, w1, 0x80000000", "cbnz\tw9, . + 8", "brk\t0xd1f", "ldr\tx9, [sp], 16"),
            ],
        ),
        (
            "sdiv\tx9, x9, x10",
            [
                *("cbnz\tx10, . + 8", "brk\t0xd1f", "str\tx11, [sp, -16]!", "add\tx11, x10, 1", "cbnz\tx11, . + 16"),
                *("eor\tx11, x9, 0x8000000000000000", "cbnz\tx11, . + 8", "brk\t0xd1f", "ldr\tx11, [sp], 16"),
            ],
        ),
        ("sdiv\tw0, w1, wzr", ["brk\t0xd1f"]),
        ("fdiv\ts0, s1, s2", []),
        ("idivl\t%ecx", []),  # x86-64
        ("divss\t%xmm1, %xmm0", []),
    ],
)
def test_a_division_is_checked_where_the_machine_does_not(division, checks):
    before, after = "\tcmp\tw1, w2\n", "\tcsel\tw0, w0, w3, eq\n"
    lines = "".join(f"\t{line}\n" for line in [*checks, division])
    assert with_checked_divisions(f"{before}\t{division}\n{after}") == before + lines + after


def test_variables_get_gaps_on_both_sides_and_shared_arrays_after_them():
    gap = "\t.zero\t256\n"

    def objects(*names: str) -> str:
        return "".join(f"\t.type\t{name}, @object\n" for name in names)

    shared = '\t.section\t.tbss,"awT",@nobits\n' + objects("row", "total")
    before = (
        "\t.section\t.rodata\n.LC0:\n\t.zero\t8\n"
        f"{shared}row:\n\t.zero\t512\ntotal:\n\t.zero\t4\n"
        f"\t.bss\n{objects('seen')}seen:\n\t.zero\t4\n"
        f"\t.data\n\t.align 1024\n{objects('table')}table:\n\t.long\t1\n\t.zero\t12\n"
        "\t.local\tcount\n\t.comm\tcount,4,8\n"
    )
    after = (
        "\t.section\t.rodata\n.LC0:\n\t.zero\t8\n"
        f"{shared}row:\n\t.zero\t512\n{gap}total:\n\t.zero\t4\n{gap}"
        f"\t.bss\n{objects('seen')}{gap}seen:\n\t.zero\t4\n{gap}"
        f"\t.data\n\t.align 1024\n{objects('table')}\t.zero\t1024\ntable:\n\t.long\t1\n\t.zero\t12\n{gap}"
        f"\t.pushsection .bss\n\t.balign 8\n{objects('count')}\t.size\tcount, 4\n"
        f"{gap}count:\n\t.zero\t4\n{gap}\t.popsection\n"
    )
    assert with_gaps(before) == after


def test_vectors_of_a_watched_kernel_may_be_anywhere():
    before = "\tmovaps\t(%rax), %xmm0\n\tmovdqa\t%xmm1, 16(%rax)\n\tmovss\t(%rax), %xmm0\n"
    assert changed(before, gaps=True) == before.replace("aps", "ups").replace("dqa", "dqu")
    assert changed(before, gaps=False) == before


# A function that copies structs: checks as gcc writes them, of lines 7 (12 bytes, aligned to 4) and 9 (16 bytes).
OF_STRUCTS = """\t.type\tcopy, {at}function
copy:
\t.loc 1 7 9
{size}
\t{call}\t__tsan_read_range{plt}
\t.loc 1 9 3
\t{call}\t__tsan_write16{plt}
\t.loc 1 11 3
{size}
\t{call}\t__tsan_write_range{plt}
\t{load}.Lubsan_data0
\t{load}.Lubsan_data1
\t.type\tother, {at}function
other:
\t.loc 1 7 9
{size}
\t{call}\t__tsan_read_range{plt}
"""
CHECK_OF = """.Lubsan_data{number}:
\t.{quad}\t.LC0
\t.{word}\t{line}
\t.{word}\t52
\t.{quad}\t.Lubsan_type1
\t.byte\t{log}
\t.byte\t{kind}
"""


@pytest.mark.parametrize(
    ("words", "size", "second", "third"),
    [
        ({"at": "@", "call": "call", "plt": "@PLT", "load": "leaq\t", "quad": "quad", "word": "long"},
         "\tmovl\t$12, %esi", "\tmovl\t${}, %esi", "\tmovl\t${}, %edx"),
        ({"at": "%", "call": "bl", "plt": "", "load": "adrp\tx0, ", "quad": "xword", "word": "word"},
         "\tmov\tx1, 12", "\tmov\tw1, {}", "\tmov\tw2, {}"),
    ],
    ids=["x86-64", "aarch64"],
)  # fmt: skip
def test_accesses_to_structs_get_the_alignment_of_their_check(words, size, second, third):
    checks = [CHECK_OF.format(number=0, line=7, log=2, kind=0, **words)]
    checks += [CHECK_OF.format(number=1, line=9, log=3, kind=1, **words)]
    changed = with_alignments(OF_STRUCTS.format(size=size, **words) + "".join(checks)).split("\n")
    call, plt = words["call"], words["plt"]
    hooks = [i for i, line in enumerate(changed) if line.startswith(f"\t{call}\t")]
    assert [changed[i].split("\t")[2].removesuffix(plt) for i in hooks] == [
        "simt_read_range", "simt_write16", "simt_write_range", "__tsan_read_range",
    ]  # fmt: skip
    before = [changed[i - 1] for i in hooks]
    assert before == [third.format(4), second.format(8), third.format(4), size]  # the last function has no check


def test_all_changes_are_made_and_gaps_only_if_asked():
    before = (
        "\tleaq\trow@tlsgd(%rip), %rdi\n\tcall\t__tls_get_addr@PLT\n\t.type\tx, @object\nx:\n\t.zero\t4\n" + DYNAMIC
    )
    plain = changed(before, gaps=False)
    assert "simt_shared_at" in plain
    assert plain.endswith("\t.set row, simt_dynamic\n")
    assert changed(before, gaps=True) == with_gaps(plain)


def test_all_changes_are_made_to_aarch64():
    before = "\tadrp\tx0, :tlsgd:row\n\tbl\t__tls_get_addr\n\tudiv\tw0, w1, w2\n" + DYNAMIC
    plain = changed(before, gaps=False)
    assert plain.startswith("\tadrp\tx0, :tlsgd:row\n\tbl\tsimt_shared_at\n\tcbnz\tw2, . + 8\n\tbrk\t0xd1f\n\tudiv")
    assert plain.endswith("\t.set row, simt_dynamic\n")
