"""The contract: YAML values, and the rules they obey; the only code that both sides import."""
