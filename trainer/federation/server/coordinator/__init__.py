"""The coordinator of a federation.

Theory of operation
-------------------
Three state machines decide, and a process acts. The machines are pure: a machine takes its state
and an event, and returns its next state and effects. It reads no clock, no file and no message.

- `round_machine`: which round is open, who takes part in it, and when it closes.
- `masking_machine`: in a masked federation, whose keys and shares are there, and when the sum can
  be unmasked.
- `coordinator_machine` is around both: who may take part, what a node is told, what the operator
  wants, and when the process may go. It gets every event, hands those of the rounds on to
  `round_machine` as they are, and then lets `masking_machine` go on as far as the rounds allow.

`events` and `effects` name every event and every effect once. What happens has one name from the
process to the rounds: a contribution that is written down and summed is `Contributed` everywhere.

`process` connects them to the broker, the clock, the ledger and the operator's actions. It turns
what comes into events, and performs each effect by one table from an effect's type to a method. An
effect that is missing there is an error. Some effects are answered by an event: `Open` by `Opened`,
`Collect` by `Contributed`, `Drop` by `Dropped`, `Unmask` by `Unmasked`.

The order of effects matters: what a node is told is on the disk before. So a coordinator that is
killed anywhere goes on from its ledger: `round_state.restore` and `masking_state.restore` make the
states of what is written there, and `Started` lets them go on.
"""
