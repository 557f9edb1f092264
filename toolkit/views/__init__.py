"""What a person sees: tables, figures and reports. Pure functions over run records, nothing measured here."""
