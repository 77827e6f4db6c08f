"""What actually ran: boards, records, traces, and where the time went."""
