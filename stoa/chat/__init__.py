"""Between messages and token ids: what a checkpoint's chat format looks like, and what a sampled turn says.

No environment and no engine is known here. Sampled ids are read, never written again.
"""
