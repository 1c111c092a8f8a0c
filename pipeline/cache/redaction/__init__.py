"""What may not be kept: questions and answers that hold what belongs to somebody.

Nothing is blacked out: an answer with such a thing in it, or in its question, is not stored, and that costs no more
than a later hit. In doubt it is therefore not stored, as long as dates, prices, versions and order numbers pass. Kinds:

- key: keys, tokens and passwords in the forms in which they are issued or sent (data/keys.yaml).
- e-mail: addresses.
- card: payment cards, by the prefixes and lengths of their issuers and the Luhn check, in groups or not.
- iban: bank accounts, by the structure of their country and their check digits.
- national_id: numbers that states give to persons (data/national_ids.yaml).
- phone: telephone numbers; those in national form for the regions that are given.

Needs the distributions phonenumbers (for phone) and python-stdnum (for card, iban and national_id).
"""

from __future__ import annotations

from pipeline.cache.redaction.phones import PHONE_REGIONS
from pipeline.cache.redaction.redaction import KINDS, Redaction

__all__ = ["KINDS", "PHONE_REGIONS", "Redaction"]
