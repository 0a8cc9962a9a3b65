#!/bin/bash
mkdir book
