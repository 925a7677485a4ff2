"""What the policy practises on: one folder or file an environment, found by name in `registry.py`.

Nothing here knows an engine, a server or a file format. It may assume the checkpoint's tokenizer.json and its settings.
"""
