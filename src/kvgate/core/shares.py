"""Whose turn it is: priority classes with floors, fair by weight between the tenants of a class.

What a tenant is charged is blocks x seconds over its weight: the expected life of a request when it
is admitted, its true life when it ends. The tenant that was charged least goes first, so that over
time tenants who want more than their share get blocks x seconds in proportion to their weights
(start-time fair queuing). Who wants nothing gains nothing: a tenant that comes back starts level with
the one served last, neither in debt for what it used while others were idle nor with savings.

Between classes the higher one goes first, except that a class that holds less than its floor (a share
of the usable blocks) goes before all that are not below theirs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, nsmallest

from kvgate.core.accounts import Account, Waiter
from kvgate.core.records import Tenant

# Tenants remembered at once; beyond it, those who hold and want nothing are forgotten.
ACCOUNTS_MAX = 4096
# How many tenants, and how many of the head's own, are looked at for one that fits in a gap.
LOOK = 4


def _place(waiter: Waiter) -> tuple[float, int]:
    return waiter.place, waiter.key


class _Class:
    """The accounts of one priority. `turns` is a heap; entries of an old version are void."""

    __slots__ = ("at_ceiling", "blocks", "head", "held", "level", "serial", "turns", "waiting", "wanting")

    def __init__(self, level: float) -> None:
        self.held = 0
        self.waiting = 0
        self.blocks = 0  # of all that wait
        self.wanting = 0.0  # sum of the weights of those who wait
        self.level = level  # charged to the one served last
        self.serial = 0
        self.turns: list[tuple[float, int, int, Account]] = []
        self.head: Waiter | None = None
        self.at_ceiling: set[Account] = set()


class Shares:
    """The accounts of all tenants."""

    __slots__ = ("_accounts", "_classes", "_order", "floors")

    def __init__(self, floors: Mapping[int, float] | None = None) -> None:
        self.floors = dict(floors or {})
        self._accounts: dict[str, Account] = {}
        self._classes: dict[int, _Class] = {}
        self._order: list[int] = []  # priorities, highest first

    def know(self, tenant: Tenant) -> None:
        """A request of this tenant has come: the operator's latest word on it counts from now on."""
        account = self._accounts.get(tenant.name)
        if account is not None and account.tenant is not tenant and account.tenant != tenant:
            self._change(account, tenant)

    def tell(self, again: Callable[[Tenant], Tenant]) -> None:
        """The operator's word on each tenant, looked up again: ceilings follow the size of the pool."""
        for account in list(self._accounts.values()):
            self.know(again(account.tenant))

    def account(self, tenant: Tenant) -> Account:
        """The account of a tenant, by its name."""
        account = self._accounts.get(tenant.name)
        if account is not None:
            return account
        if len(self._accounts) >= ACCOUNTS_MAX:
            self._forget()
        if tenant.priority not in self._classes:
            self._classes[tenant.priority] = _Class(0.0)
            self._order = sorted(self._classes, reverse=True)
        account = self._accounts[tenant.name] = Account(tenant)
        return account

    def held(self) -> dict[str, int]:
        """Blocks by the name of the tenant that holds them; who holds none is left out."""
        return {name: account.held for name, account in self._accounts.items() if account.held}

    def hold(self, tenant: Tenant, blocks: int, cost: float) -> Account:
        """`blocks` were granted; `cost` is blocks x expected seconds."""
        account = self.account(tenant)
        klass = self._classes[account.tenant.priority]
        if not account.waiting and account.charged < klass.level:
            account.charged = klass.level
        elif account.charged > klass.level:
            klass.level = account.charged
        account.charged += cost / account.tenant.weight
        account.held += blocks
        klass.held += blocks
        self._turn(klass, account)
        return account

    def let_go(self, account: Account, blocks: int, correction: float) -> None:
        """`blocks` came back; `correction` is true minus expected cost (0 for a part given back)."""
        klass = self._classes[account.tenant.priority]
        account.charged += correction / account.tenant.weight
        account.held -= blocks
        klass.held -= blocks
        klass.at_ceiling.discard(account)
        self._turn(klass, account)

    def join(self, waiter: Waiter) -> None:
        account = self.account(waiter.ask.tenant)
        klass = self._classes[account.tenant.priority]
        if not account.waiting:
            account.charged = max(account.charged, klass.level)
            klass.wanting += account.tenant.weight
        insort(account.waiting, (waiter.place, waiter.key, waiter))
        account.blocks += waiter.blocks
        klass.blocks += waiter.blocks
        klass.waiting += 1
        if account.waiting[0][1] == waiter.key:
            klass.at_ceiling.discard(account)
            self._turn(klass, account)

    def leave(self, waiter: Waiter) -> None:
        account = self._accounts[waiter.ask.tenant.name]
        klass = self._classes[account.tenant.priority]
        at = bisect_left(account.waiting, (waiter.place, waiter.key))
        del account.waiting[at]
        account.blocks -= waiter.blocks
        klass.blocks -= waiter.blocks
        klass.waiting -= 1
        if klass.head is waiter:
            klass.head = None
        if not account.waiting:
            klass.wanting -= account.tenant.weight
        if at == 0:
            klass.at_ceiling.discard(account)
            self._turn(klass, account)

    def head(self, usable: int) -> Waiter | None:
        """Who goes next. Stays the head of its class until it is let in or leaves."""
        for priority in self._by_turn(usable):
            head = self._head_of(self._classes[priority])
            if head is not None:
                return head
        return None

    def behind(self, head: Waiter, usable: int) -> Iterator[Waiter]:
        """A few who might fit beside a head that does not: other tenants, its own, other classes."""
        own = self._accounts[head.ask.tenant.name]
        klass = self._classes[own.tenant.priority]
        yield from self._next_turns(klass, own)
        for _, _, waiter in own.waiting[: LOOK + 1]:
            if waiter is not head and own.may_take(waiter.blocks):
                yield waiter
        for priority in self._by_turn(usable):
            if self._classes[priority] is not klass:
                other = self._head_of(self._classes[priority])
                if other is not None:
                    yield other

    def at_ceilings(self) -> list[Waiter]:
        """The first of a few tenants that wait for their own ceilings only, the longest waits first."""
        accounts = [a for klass in self._classes.values() for a in klass.at_ceiling if a.waiting]
        return nsmallest(LOOK, [a.waiting[0][2] for a in accounts], key=_place)

    def outranks(self, tenant: Tenant, head: Waiter, usable: int) -> bool:
        """Whether a newcomer of this tenant would be the head instead of `head`."""
        klass = self._classes[self.account(tenant).tenant.priority]
        other = self._classes[self._accounts[head.ask.tenant.name].tenant.priority]
        if klass is other or klass.waiting:
            return False
        klass.waiting += 1  # as if it stood there
        order = self._by_turn(usable)
        klass.waiting -= 1
        first = next(p for p in order if self._classes[p] is klass or self._classes[p] is other)
        return self._classes[first] is klass

    def first_of(self, tenant: Tenant) -> Waiter | None:
        """The tenant's own that has waited longest."""
        account = self._accounts.get(tenant.name)
        return account.waiting[0][2] if account is not None and account.waiting else None

    def is_near(self, tenant: Tenant) -> bool:
        """Whether few enough of the tenant's own wait that it does not jump a queue of them."""
        return len(self.account(tenant).waiting) <= LOOK

    def blocks_before(self, tenant: Tenant) -> float:
        """About how many blocks go to others before a newcomer of this tenant has its turn.

        Its own that wait, and as much for each unit of the others' weights as for its own, as far
        as the others want it; all that waits in higher classes.
        """
        account = self.account(tenant)
        klass = self._classes[account.tenant.priority]
        own = account.blocks
        higher = sum(self._classes[p].blocks for p in self._order if p > account.tenant.priority)
        same = klass.wanting - (account.tenant.weight if account.waiting else 0.0)
        return higher + own + min(klass.blocks - own, own * same / account.tenant.weight)

    def share_of_line(self, tenant: Tenant) -> float:
        """The part of its class's places that a tenant has by weight, beside all others that wait."""
        account = self.account(tenant)
        wanting = self._classes[account.tenant.priority].wanting
        if not account.waiting:
            wanting += account.tenant.weight
        return account.tenant.weight / wanting

    # --- inside

    def _by_turn(self, usable: int) -> list[int]:
        if len(self._order) < 2 or not self.floors:
            return self._order

        def below_floor(priority: int) -> bool:
            klass = self._classes[priority]
            return klass.waiting > 0 and klass.held < self.floors.get(priority, 0.0) * usable

        return sorted(self._order, key=lambda p: not below_floor(p))  # stable: highest first in each

    def _head_of(self, klass: _Class) -> Waiter | None:
        head = klass.head
        if head is not None:
            account = self._accounts[head.ask.tenant.name]
            if account.may_take(head.blocks):
                return head
            klass.head = None
            klass.at_ceiling.add(account)
        turns = klass.turns
        while turns:
            _, _, version, account = turns[0]
            if version != account.version or not account.waiting or account in klass.at_ceiling:
                heappop(turns)
                continue
            first = account.waiting[0][2]
            if not account.may_take(first.blocks):
                klass.at_ceiling.add(account)
                continue
            klass.head = first
            return first
        return None

    def _next_turns(self, klass: _Class, own: Account) -> list[Waiter]:
        found: list[Waiter] = []
        kept = []
        while klass.turns and len(found) < LOOK:
            entry = heappop(klass.turns)
            account = entry[3]
            if entry[2] != account.version or not account.waiting:
                continue
            kept.append(entry)
            first = account.waiting[0][2]
            if account is not own and account not in klass.at_ceiling and account.may_take(first.blocks):
                found.append(first)
        for entry in kept:
            heappush(klass.turns, entry)
        return found

    def _turn(self, klass: _Class, account: Account) -> None:
        """Put the account where it belongs in the order of turns."""
        if not account.waiting:
            return
        account.version += 1
        klass.serial += 1
        heappush(klass.turns, (account.charged, klass.serial, account.version, account))
        if len(klass.turns) > 2 * klass.waiting + 64:
            klass.turns = [entry for entry in klass.turns if entry[2] == entry[3].version]
            heapify(klass.turns)

    def _change(self, account: Account, tenant: Tenant) -> None:
        """The operator has changed a tenant: it keeps what it holds, and moves to its class."""
        old = self._classes[account.tenant.priority]
        if tenant.priority not in self._classes:
            self._classes[tenant.priority] = _Class(old.level)
            self._order = sorted(self._classes, reverse=True)
        new = self._classes[tenant.priority]
        if old.head is not None and old.head.ask.tenant.name == tenant.name:
            old.head = None
        old.at_ceiling.discard(account)
        waiting = len(account.waiting)
        old.held, old.waiting = old.held - account.held, old.waiting - waiting
        old.blocks, new.blocks = old.blocks - account.blocks, new.blocks + account.blocks
        if waiting:
            old.wanting -= account.tenant.weight
            new.wanting += tenant.weight
        new.held, new.waiting = new.held + account.held, new.waiting + waiting
        account.tenant = tenant
        self._turn(new, account)

    def _forget(self) -> None:
        idle = [n for n, a in self._accounts.items() if not a.held and not a.waiting]
        for name in idle:
            del self._accounts[name]
