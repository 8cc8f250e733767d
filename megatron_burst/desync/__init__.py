"""After a fault: which ranks are out of step, or are waited for, in one sentence.

`differing` says what ranks began that are not at the same call, `verdict` which rank others wait
for, from `hops`, the transfers under way. `comm.detector` notices the fault; nothing here is loaded
before.
"""
