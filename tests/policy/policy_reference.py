"""Algorithm 1 of the PSR paper (§4.1) read once more, in plain Python: sets, dicts and `sorted`, nothing shared with
the package but the configuration. Slow and obvious; the compiled policy must agree with it in every integer.
"""

import math

import numpy as np

from edgemoe.policy import Policy

f32 = np.float32


def top(experts, m, *keys):
    """The m best of the experts by descending keys in turn, then by ascending index."""
    return sorted(experts, key=lambda e: (*(-float(key[e]) for key in keys), e))[:m]


def gap(best, z):
    """z − best; two masked experts are no further apart than any two."""
    return f32(0) if z == best == -math.inf else z - best


class Layer:
    def __init__(self, policy: Policy, n_experts, k, capacity, delta, warm, pi, pins=()):
        self.policy, self.E, self.k, self.C = policy, n_experts, k, capacity
        self.delta, self.warm, self.pi = f32(delta), list(dict.fromkeys(warm)), pi
        self.pins = list(pins)
        self.reset()

    def reset(self):
        start = list(dict.fromkeys([*self.pins, *self.warm, *range(self.E)]))[: len(self.pins) + self.C]
        self.slot = {e: s for s, e in enumerate(start)}
        self.fast = [f32(0)] * self.E
        self.slow = [f32(0)] * self.E
        self.last_use = [0] * self.E
        self.uses = [0] * self.E
        self.ranges = f32(0)
        self.tokens = 0

    def begin(self, token):
        pi = self.pi[token] if self.pi is not None else [f32(0)] * self.E
        self.a = [(self.fast[e] + self.slow[e]) + pi[e] for e in range(self.E)]
        self.p = {
            "lru": self.last_use[:],
            "lfu": self.uses[:],
            "static": [self.E - self.warm.index(e) if e in self.warm else 0 for e in range(self.E)],
            "score": self.a,
        }[self.policy.eviction]
        self.B = set()
        self.predicted = None

    def bonus(self, observed):
        if self.policy.scale == "fixed":
            return f32(self.policy.lam) * self.delta
        return f32(self.policy.lam) * (self.ranges / f32(observed)) if observed else f32(0)

    def with_bonus(self, z, favoured, bonus):
        return [z[e] + bonus if e in favoured else z[e] for e in range(self.E)]

    def insert(self, e, candidates):
        evicted = min(candidates, key=lambda j: (self.p[j], j))
        self.slot[e] = self.slot.pop(evicted)
        return e, self.slot[e]

    def part1(self, g):
        policy, copies = self.policy, []
        if policy.prefetch == "none":
            return copies
        if policy.prefetch == "token-prior":
            visited = [e for e in top(range(self.E), policy.window, self.a) if self.a[e] > 0]
        else:
            self.predicted = top(range(self.E), self.k, g)
            visited = [e for e in top(range(self.E), policy.window, g) if g[e] != -math.inf]
        if policy.gate == "predicted":
            biased = self.with_bonus(g, set(self.slot), self.bonus(self.tokens))
            passed = set(top(range(self.E), self.k, biased, g))
            visited = [e for e in visited if e in passed]
        for e in visited:
            if e in self.slot:
                self.B.add(e)
            elif len(copies) < policy.budget:
                copies.append(self.insert(e, set(self.slot) - self.B - set(self.pins)))
                self.B.add(e)
        return copies

    def choose(self, z):
        policy = self.policy
        everyone = range(self.E)
        if policy.routing == "cache-prior":
            favoured = set(self.slot) | set(top(everyone, policy.top_j, z))
            return top(everyone, self.k, self.with_bonus(z, favoured, self.bonus(self.tokens + 1)), z)
        if policy.routing == "speculative" and self.predicted is not None:
            return self.predicted
        if policy.routing == "tau":
            left, chosen = top(everyone, self.E, z), []
            for _ in range(self.k):
                least = z[left[0]] + f32(math.log1p(-policy.tau))
                near = [e for e in left if e in self.slot and z[e] >= least and z[e] != -math.inf]
                chosen.append(near[0] if near else left[0])
                left.remove(chosen[-1])
            return chosen
        return top(everyone, self.k, z)

    def part2(self, z):
        finite = [x for x in z if x != -math.inf]
        if finite:
            self.ranges = self.ranges + (max(finite) - min(finite))
        own = top(range(self.E), self.k, z)
        executed = top(self.choose(z), self.k, z)
        if self.policy.elide:
            least = f32(math.log(self.policy.elide) - math.log1p(-self.policy.elide))
            while len(executed) > 1 and gap(z[executed[0]], z[executed[-1]]) < least:
                executed.pop()
        return executed, self.finish(executed, own)

    def finish(self, executed, own):
        S, copies, pins = set(executed), [], set(self.pins)
        for e in sorted(S - set(self.slot)):
            copies.append(self.insert(e, set(self.slot) - S - self.B - pins or set(self.slot) - S - pins))
        self.tokens += 1
        for e in S:
            self.last_use[e] = self.tokens
            self.uses[e] += 1
        for e in range(self.E):
            self.fast[e] = self.fast[e] * f32(0.5)
            self.slow[e] = self.slow[e] * f32(0.98)
            if e in own:
                self.fast[e] = self.fast[e] + f32(0.5)
                self.slow[e] = self.slow[e] + f32(0.02)
        return copies
