// Switching stacks by hand: the whole of what makes a CUDA thread cheap enough to have thousands.
//
// simt_switch(save, load) pushes the registers that a callee must preserve, stores the stack pointer in *save, takes
// `load` as the new stack pointer and pops what was pushed there. To the compiler it is an ordinary function call.
// The floating-point control word is not saved: kernels have no way to change it.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// The name is given explicitly because macOS would put an underscore in front of it.
extern "C" void simt_switch(void** save, void* load) asm("simt_switch");

namespace simt {

// Lays out a fresh stack so that the first switch to it enters `start` (which must never return).
void* fresh_stack(void* top, void (*start)());

#ifdef SIMT_FIBER_IMPLEMENTATION
#if defined(__x86_64__)
asm(".text\n.p2align 4\n.globl simt_switch\nsimt_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n");

void* fresh_stack(void* top, void (*start)()) {
    // On entry a function expects the stack 8 bytes off a multiple of 16, as after a call.
    void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
    *--sp = nullptr;  // the return address of `start`: none
    *--sp = reinterpret_cast<void*>(start);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(".text\n.p2align 4\n.globl simt_switch\nsimt_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\n"
    "mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");

void* fresh_stack(void* top, void (*start)()) {
    uintptr_t sp = (reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 160;
    memset(reinterpret_cast<void*>(sp), 0, 160);
    reinterpret_cast<void**>(sp)[11] = reinterpret_cast<void*>(start);  // x30, where `ret` goes
    return reinterpret_cast<void*>(sp);
}
#else
#error "The SIMT machine switches stacks by hand and knows x86-64 and aarch64 only."
#endif
#endif
}  // namespace simt
