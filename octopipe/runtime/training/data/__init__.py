"""Training data: one file per kind of source, each read as numbered samples of seq + 1 tokens.

| file | holds |
|---|---|
| `source.py` | what a source is, and the shuffle that needs no memory |
| `synthetic.py` | synthetic tokens |
| `corpus.py` | concatenated documents, divided into samples; the check of ids against the vocabulary |
| `token_file.py` | `.npy` and `.bin` |
| `megatron_file.py` | Megatron's `.bin` with its `.idx` |
| `text.py`, `hf_dataset.py` | documents of a jsonl file, of a saved Hugging Face dataset |
| `samples.py` | stored inputs of models with a tower or an encoder |
| `tokenizer.py`, `kept.py` | text into tokens; tokenized documents kept in the cache folder |
| `opening.py` | which of these a path is |
| `batches.py` | samples as micro-batches (the one file here that needs torch) |
"""
