"""The warm start on Macs: supervised fine-tuning of a policy on an environment's demonstrations, alone or wired together."""
