// Asynchronous products of matrices (PTX: wgmma). Each thread has a list of them, in batches that it commits and waits for.
//
// A product is computed as late as the rules allow, by the wait that completes its batch. Until then its result registers
// hold NaNs, and a checked launch reports a store to its operands in shared memory. So a missing wait shows in every run.
// Sums of halves are computed at once, because Triton unpacks their pairs before the wait, and ptxas moves that behind it.
#pragma once

#include "bulk_copies.h"
#include "collectives.h"

using simt::Product;

static bool same_result(const Product& a, const Product& b) { return a.out[0] == b.out[0]; }

// Keep the registers that the product continues from, and make them useless to anybody else.
static void take_registers(Product& p) {
    for (u32 i = 0; i < p.num_out; ++i) p.start[i] = *p.out[i], *p.out[i] = ~0u;
}

// The lanes of a warp have come to a wait: compute the products that it completes.
static void complete_products(void** lanes) {
    Worker& w = *worker;
    size_t number = 0;
    for (int lane = 0; lane < 32; ++lane) {
        Thread& t = *(Thread*)lanes[lane];
        const auto& products = asynchronous(t).products;
        size_t own = 0;
        while (own < products.size() && products[own].batch < t.value) ++own;
        if (lane && own != number) return raise_argument(w, t.site, "waits for other products than lane 0 of its warp");
        number = own;
    }
    for (size_t i = 0; i < number; ++i) {
        Product* together[32];
        for (int lane = 0; lane < 32; ++lane) together[lane] = &asynchronous(*(Thread*)lanes[lane]).products[i];
        const Product& first = *together[0];
        for (const Product* p : together)
            if (p->site != first.site || p->a != first.a || p->b != first.b)
                return raise_argument(w, p->site, "multiplies other matrices than lane 0 of its warp");
        count(w, first.site, MMA);
        first.compute(together);
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto& products = asynchronous(*(Thread*)lanes[lane]).products;
        for (size_t i = number; i < products.size(); ++i) {
            Product& later = products[i];
            bool continues = false;
            for (size_t j = 0; j < number; ++j) continues |= same_result(products[j], later);
            for (size_t j = number; j < i; ++j) continues &= !same_result(products[j], later);
            if (continues) take_registers(later), later.is_chained = false;
        }
        products.erase(products.begin(), products.begin() + (ptrdiff_t)number);
    }
}

// The products of the batches before `batch` read no more. Their reads end now, which is when a later store must not race.
void release_operands(Worker& w, u64 batch) {
    Thread& me = *w.current;
    auto& operands = asynchronous(me).operands;
    while (!operands.empty() && operands.front().batch < batch) {
        const MatrixPiece piece = operands.front();
        operands.pop_front();
        end_flight(w, piece.address, me.id, piece.site);
        if (me.state != GONE) check(w, {piece.address, 16, READ, false, true, piece.site, false, true}, 1);
    }
}

extern "C" {
// The operand of 16 bytes at `address` is read until the product that follows is complete. A warp's `share` of the reads
// is counted: the four warps of a product read B together.
void simt_product_reads(const char* address, bool share) {
    Worker& w = *worker;
    Thread& me = *w.current;
    if (w.job->launch.mode == PLAIN || (w.job->launch.mode == OBSERVE && !share)) return;
    if (!is_shared(*w.block, address)) return raise_argument(w, CALLER, "multiplies a matrix that is not in shared memory");
    announce({address, 16, READ, false, false, CALLER, false, true}, 16);
    if (w.job->launch.mode != CHECK) return;
    begin_flight(w, address, 16, READ, me.id, CALLER);
    Asynchronous& own = asynchronous(me);
    own.operands.push_back({address, own.product_batches, CALLER});
}
void simt_product(const Product* p) {
    Worker& w = *worker;
    Asynchronous& own = asynchronous(*w.current);
    if (w.job->num_threads % 128) raise_argument(w, CALLER, "issues wgmma in a thread block that is no multiple of 128 threads");
    if (!own.products_fenced && w.job->launch.mode == CHECK)
        raise_argument(w, CALLER, "issues wgmma.mma_async, and no wgmma.fence stands between the last wait and this product");
    own.products.push_back(*p);
    Product& last = own.products.back();
    last.batch = own.product_batches, last.site = CALLER;
    for (size_t i = 0; i + 1 < own.products.size(); ++i) last.is_chained |= same_result(own.products[i], last);
    if (!last.is_chained) take_registers(last);
    if (!p->at_once) return;
    w.current->value = own.product_batches + 1;
    meet(w, MATRIX, ~0u, w.current, complete_products, 0, CALLER);
}
void simt_products_fence() { asynchronous(*worker->current).products_fenced = true; }
void simt_products_commit() { asynchronous(*worker->current).product_batches++; }
void simt_products_wait(u32 newest, int line) {
    Worker& w = *worker;
    Thread& me = *w.current;
    Asynchronous& own = asynchronous(me);
    own.products_fenced = false;
    me.value = own.product_batches - std::min<u64>(newest, own.product_batches);
    u64 batch = me.value;
    meet(w, MATRIX, ~0u, &me, complete_products, line, CALLER);
    release_operands(w, batch);
}
}
