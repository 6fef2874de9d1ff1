"""Innermost loops of machine code, in listings written by hand."""

from tests.ops.sass_loops import innermost_loops

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   STL [R1], R2 ;
        /*0020*/                   LDL R2, [R1] ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0040*/                   STL [R1+0x4], R3 ;
        /*0050*/               @P0 BRA 0x30 ;
        /*0060*/              @!P1 BRA 0x20 ;
        /*0070*/                   EXIT ;
        /*0080*/                   BRA 0x80 ;
"""


def test_only_the_innermost_loop_is_returned() -> None:
    [loop] = innermost_loops(LISTING, "GMMA")
    assert [text.split(" ")[0] for text in loop] == ["HGMMA.64x64x16.F32", "STL", "BRA"]


def test_a_loop_without_the_instruction_is_left_out() -> None:
    listing = LISTING.replace("HGMMA.64x64x16.F32", "FFMA")
    assert innermost_loops(listing, "GMMA") == []


def test_a_jump_backwards_into_the_middle_is_no_loop() -> None:
    """A path from the entry reaches the jump without passing its target."""
    listing = """
        /*0000*/               @P0 BRA 0x20 ;
        /*0010*/                   HGMMA R24, R24 ;
        /*0020*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0030*/               @P1 BRA 0x10 ;
        /*0040*/                   EXIT ;
"""
    assert innermost_loops(listing, "GMMA") == []
