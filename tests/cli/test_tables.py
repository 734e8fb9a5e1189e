import itertools
import subprocess
import sys


def test_writing_ends_quietly_where_the_reader_has_enough():
    endless = "import itertools; from linvit_cli.tables import show_pieces; show_pieces(itertools.repeat('word '))"
    with subprocess.Popen(
        [sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as writer:
        read = "".join(itertools.islice(iter(lambda: writer.stdout.read(5), ""), 3))
        writer.stdout.close()
        complaints = writer.stderr.read()
    assert read == "word word word "
    assert writer.returncode == 0
    assert "Traceback" not in complaints
    assert "Broken pipe" not in complaints
