"""Write the schemas next to this file."""

from conformance.schema import DIRECTORY, texts

for name, text in texts().items():
    (DIRECTORY / name).write_text(text, encoding="utf-8")
