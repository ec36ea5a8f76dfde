"""The table of transcripts: whatever a model says stays in its cell."""

from trainer.telemetry.transcripts import MAX_CELL_CHARS, Transcript, markdown_table


def test_a_row_per_transcript_whatever_it_holds() -> None:
    odd = Transcript("2+2?\nAnswer:", "4", "a|b <script>\r\n\n#### 4 & more", "4", 1.0)
    lines = markdown_table([odd, Transcript("q", "4", "x" * 9999, None, 0.0)]).split("\n")
    assert len(lines) == 4
    assert lines[2] == "| 2+2?<br>Answer: | a&#124;b &lt;script&gt;<br><br>#### 4 &amp; more | 4 | 4 | 1 |"
    assert lines[3].count("x") == MAX_CELL_CHARS
    assert lines[3].endswith(" … | (none) | 4 | 0 |")
