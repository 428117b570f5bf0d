"""Changes to a kernel's assembly, as samples of what gcc writes: before and after."""

import pytest

from cudascope.simt.assembly import (
    changed,
    has_empty_loop,
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\tcall\t__tls_get_addr@PLT\n", "\tcall\tsimt_shared_at@PLT\n"),
        ("\tcall\tmalloc@PLT\n", "\tcall\tsimt_malloc@PLT\n"),
        ("\tcall\t_Znwm@PLT\n", "\tcall\tsimt_malloc@PLT\n"),
        ("\tcall\t_Znam@PLT\n", "\tcall\tsimt_malloc@PLT\n"),
        ("\tjmp\tfree@PLT\n", "\tjmp\tsimt_free_memory@PLT\n"),
        ("\tcall\t_ZdlPvm@PLT\n", "\tcall\tsimt_free_memory@PLT\n"),
        ("\tcall\t_ZdaPv@PLT\n", "\tcall\tsimt_free_memory@PLT\n"),
        ("\tcall\texit@PLT\n", "\tcall\tsimt_host_exit@PLT\n"),
        ("\tcall\t_exit@PLT\n", "\tcall\tsimt_host_exit@PLT\n"),
        ("\tcall\t__cxa_throw@PLT\n", "\tcall\tsimt_throw@PLT\n"),
        ("\tcall\tat_exit@PLT\n", "\tcall\tat_exit@PLT\n"),
        ("\tcall\tmy_malloc@PLT\n", "\tcall\tmy_malloc@PLT\n"),
        ("\tcall\tfreed@PLT\n", "\tcall\tfreed@PLT\n"),
        ("malloc:\n\tret\n", "malloc:\n\tret\n"),
    ],
)
def test_calls_go_to_the_runtime(before, after):
    assert with_runtime_functions(before) == after


@pytest.mark.parametrize(
    ("use", "defined"),
    [
        ("\tleaq\trow@tlsgd(%rip), %rdi\n", "\t.globl row\n\t.set row, simt_dynamic\n"),
        ("\tadrp\tx0, :tlsdesc:row\n", "\t.globl row\n\t.set row, simt_dynamic\n"),  # aarch64
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


def test_shared_arrays_and_variables_get_gaps_and_tables_get_none():
    before = (
        "\t.section\t.rodata\n\t.zero\t8\n"
        '\t.section\t.tbss,"awT",@nobits\nrow:\n\t.zero\t512\ntotal:\n\t.zero\t4\n'
        "\t.bss\nseen:\n\t.zero\t4\n"
        "\t.data\ntable:\n\t.long\t1\n\t.zero\t12\n"
        "\t.local\tcount\n\t.comm\tcount,4,4\n"
    )
    after = (
        "\t.section\t.rodata\n\t.zero\t8\n"
        '\t.section\t.tbss,"awT",@nobits\nrow:\n\t.zero\t512\n\t.zero\t256\ntotal:\n\t.zero\t4\n\t.zero\t256\n'
        "\t.bss\nseen:\n\t.zero\t4\n\t.zero\t256\n"
        "\t.data\ntable:\n\t.long\t1\n\t.zero\t12\n"
        "\t.local\tcount\n\t.comm\tcount,260,4\n"
    )
    assert with_gaps(before) == after


def test_all_changes_are_made_and_gaps_only_if_asked():
    before = "\tleaq\trow@tlsgd(%rip), %rdi\n\tcall\t__tls_get_addr@PLT\n\t.bss\n\t.zero\t4\n" + DYNAMIC
    plain = changed(before, gaps=False)
    assert "simt_shared_at" in plain
    assert plain.endswith("\t.set row, simt_dynamic\n")
    assert changed(before, gaps=True) == with_gaps(plain)
